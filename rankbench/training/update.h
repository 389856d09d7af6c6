// Clipping, and the step of an optimiser, as torch.optim takes it. fused_step.cpp includes this file.

#include <cmath>

struct Rule {
    long kind, count;  // count: number of this step, from 1
    double rate, weight_decay, momentum, beta1, beta2, epsilon, clip;  // clip: infinity for none
};
enum { GRADIENTS, SGD, ADAM, ADAMW };  // GRADIENTS: the weights stay

// What clipping multiplies all gradients of a seed by.
static real clipping(const Rule& rule, long number, const real* d) {
    if (std::isinf(rule.clip)) return 1;
    double square = 0;
#pragma omp simd reduction(+ : square)
    for (long i = 0; i < number; i++) square += double(d[i]) * d[i];
    const double over = rule.clip / std::sqrt(square);
    return over > 1 ? 1 : over;  // nan stays nan
}
// first, second: the moments; those that the rule does not have are not read. factor: of clipping.
static void update(const Rule& rule, real factor, long number, real* w, const real* d, real* first, real* second) {
    const real decay = rule.weight_decay, rate = rule.rate;
    if (rule.kind == SGD) {
        const real momentum = rule.momentum;
        for (long i = 0; i < number; i++) {
            real slope = d[i] * factor + decay * w[i];
            if (first) slope = first[i] = momentum * first[i] + slope;
            w[i] -= rate * slope;
        }
        return;
    }
    const real beta1 = rule.beta1, beta2 = rule.beta2, epsilon = rule.epsilon;
    const real rest1 = 1 - rule.beta1, rest2 = 1 - rule.beta2;  // of a beta near 1 in float, these would be wrong
    const real rate1 = rule.rate / (1 - std::pow(rule.beta1, rule.count));
    const real root2 = std::sqrt(1 - std::pow(rule.beta2, rule.count));
    const real coupled = rule.kind == ADAM ? decay : 0, shrinking = rule.kind == ADAMW ? 1 - rule.rate * rule.weight_decay : 1;
    for (long i = 0; i < number; i++) {
        const real slope = d[i] * factor + coupled * w[i];
        first[i] = beta1 * first[i] + rest1 * slope;
        second[i] = beta2 * second[i] + rest2 * slope * slope;
        w[i] = shrinking * w[i] - rate1 * first[i] / (std::sqrt(second[i]) / root2 + epsilon);
    }
}
