// One step of training of a Transformer: forward pass, backward pass, clipping and optimiser, for several seeds.
//
// Each thread takes one seed after the other, so that the weights of a seed stay in the cache; where there are more
// threads than seeds, each takes a part of a seed's sequences. These pass through the whole network a chunk at a time, so
// that the states of a chunk stay there too. Matrix products are those of products.h; everything else, in seed.h,
// parts.h and update.h, is a loop whose bounds the compiler knows, from
//
//     REAL float or double    WIDTH    HEADS    HEAD_WIDTH    VALUE_WIDTH    HIDDEN    OUTPUTS
//     SHARED 1 if keys are the queries, else 0
//     TOKENS of a sequence; undefined if batches differ in length
//
// The sub-layers, norms, biases and factors of the network stand in the structures of network.h. A sub-layer is, as in
// rankbench/model/network.py,
//
//     after(skip x + branch behind(f(before(x)))),
//
// where f is attention or an MLP and each of the three norms may be missing. Each part has its derivative next to it.
// Sums are reordered only where `omp simd reduction` says so, and no flag of the compiler assumes finite numbers: nan and
// infinity reach the loss.
//
// Shapes: B sequences of a chunk, T = B N their tokens, N query token, M key token, D width, H head, K head width, V width
// of a head's values, I = H K, J = H V, E of all queries, keys and values, F hidden width, C outputs. Matrices are stored
// row by row.

using real = REAL;
#include "seed.h"
#include "threads.h"
#include "update.h"

static void set_length([[maybe_unused]] const Batch& batch) {
#ifndef TOKENS
    N = batch.num_tokens;
#endif
}
// How many numbers `step` needs as its memory.
extern "C" long memory_of_step(const Network* network, const Batch* batch) {
    set_length(*batch);
    return Seed(*network, *batch, nullptr).size;
}

// The product of products.h, for the benchmark.
extern "C" void product(long M, long N, long K, const Matrix* a, const Matrix* b, real* c, long adds) {
    multiply(M, N, K, *a, *b, c, N, adds);
}

// Takes a step with every seed: weights and moments (S, num_weights); scores (3, S). To sums, (4, S), are added the mean
// loss, the accuracy, the tokens, and 1 as long as the sum of losses is finite; null: there are none. gradients: one row
// for each part of each seed, (parts, S, num_weights), of which those of the first part become the seed's; or only one
// for each thread, if `of_threads`, which needs a rule and seeds that are not in parts. memory: for each thread. All rows
// begin at a multiple of 64 bytes.
extern "C" void step(const Network* network, const Batch* batch, const Rule* rule, long of_threads, real* weights,
                     real* gradients, real* first, real* second, double* scores, double* sums, real* memory) {
    set_length(*batch);
    const long S = batch->num_seeds, parts = batch->num_parts, P = network->num_weights;
    std::vector<Seed> seeds;
    for (long thread = 0; thread < batch->num_threads; thread++) {
        seeds.emplace_back(*network, *batch, memory);
        memory += seeds[0].size;
    }
    const auto update_part = [&](real factor, long seed, const real* d, long begin, long end) {
        const long from = seed * P + begin;
        update(*rule, factor, end - begin, weights + from, d + begin, first ? first + from : nullptr,
               second ? second + from : nullptr);
    };
    std::vector<Score> of_parts(S * parts);
    divide(batch->num_threads, S * parts, [&](long thread, long number) {
        set_length(*batch);  // in this thread
        const long seed = number % S, part = number / S;
        const auto first_of = [&](long part) { return part * batch->num_sequences / parts; };
        real* d = gradients + (of_threads ? thread : number) * P;
        of_parts[number] = seeds[thread].gradients(weights + seed * P, d, seed, first_of(part), first_of(part + 1));
        if (rule->kind != GRADIENTS && parts == 1) update_part(clipping(*rule, P, d), seed, d, 0, P);
    });
    for (long seed = 0; seed < S; seed++) {
        Score score = of_parts[seed];
        for (long part = 1; part < parts; part++)
            score.loss += of_parts[part * S + seed].loss, score.right += of_parts[part * S + seed].right;
        scores[seed] = score.loss, scores[S + seed] = score.right, scores[2 * S + seed] = score.tokens;
        if (!sums) continue;
        sums[seed] += score.loss / score.tokens, sums[S + seed] += score.right / score.tokens;
        sums[2 * S + seed] += score.tokens, sums[3 * S + seed] += sums[seed] < INFINITY;  // false for nan, which stays
    }
    if (parts == 1) return;
    constexpr long BLOCK = 1 << 14;  // weights that a thread takes at a time
    const long blocks = (P + BLOCK - 1) / BLOCK;
    divide(batch->num_threads, S * blocks, [&](long, long number) {
        const long seed = number / blocks, begin = number % blocks * BLOCK, end = std::min(begin + BLOCK, P);
        for (long part = 1; part < parts; part++)
            for (long i = seed * P + begin; i < seed * P + end; i++) gradients[i] += gradients[part * S * P + i];
    });
    if (rule->kind == GRADIENTS) return;
    std::vector<real> factors(S);
    for (long seed = 0; seed < S; seed++) factors[seed] = clipping(*rule, P, gradients + seed * P);
    divide(batch->num_threads, S * blocks, [&](long, long number) {
        const long seed = number / blocks, begin = number % blocks * BLOCK;
        update_part(factors[seed], seed, gradients + seed * P, begin, std::min(begin + BLOCK, P));
    });
}
