// The parts of a network, forward and backward: maps, norms, dropout, attention, activations. Sizes, shapes and the order
// of numbers are those of fused_step.cpp, which includes this file.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "products.h"

constexpr long D = WIDTH, H = HEADS, K = HEAD_WIDTH, V = VALUE_WIDTH, F = HIDDEN, C = OUTPUTS;
constexpr long I = H * K, J = H * V, E = (SHARED ? 1 : 2) * I + J;
#ifdef TOKENS
constexpr long N = TOKENS;
#else
static thread_local long N;  // of the sequences of this thread's batch
#endif

// Where the numbers begin in the weights of a seed; -1: the part is missing.
struct Affine {
    long weight, bias;
};
struct Norm {
    long kind, weight, shift;
    double factor;
};
enum { NO_NORM, LAYERNORM, RMSNORM, L2NORM };  // L2NORM: by the length of the token, and its weight is a single number

// --- functions of one number, without branches, so that loops over them are vectorised --------------------------------

static constexpr double factorial(int n) { return n ? n * factorial(n - 1) : 1; }

// e^x for x <= 0 or nan; 0 below the normal numbers.
static inline real exponential(real x) {
    constexpr bool is_float = sizeof(real) == 4;
    using Bits = std::conditional_t<is_float, uint32_t, uint64_t>;
    constexpr real lowest = is_float ? -87 : -708, to_integer = is_float ? 0x1.8p23 : 0x1.8p52;
    constexpr real ln2_upper = is_float ? 0x1.62e4p-1 : 0x1.62e42fefap-1;  // its multiples up to -lowest are exact
    constexpr real ln2_lower = is_float ? 0x1.7f7d1cf79abcap-20 : 0x1.cf79abc9e3b3ap-40;
    const real shifted = std::max(lowest, x) * real(0x1.71547652b82fep0) + to_integer;  // its last bits: x / ln 2
    const real power = shifted - to_integer;
    const real rest = (x - power * ln2_upper) - power * ln2_lower;  // at most ln 2 / 2 in size
    real series = 0;
    for (int i = is_float ? 7 : 13; i >= 0; i--) series = series * rest + real(1 / factorial(i));
    Bits bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + (is_float ? 127 : 1023)) << (is_float ? 23 : 52);
    real power_of_two;
    std::memcpy(&power_of_two, &bits, sizeof bits);
    return x < lowest ? 0 : series * power_of_two;
}

// Share of a normal distribution above u >= 0, where bell = e^(-u^2 / 2).
static inline real upper_tail(real u, real bell) {
    if constexpr (sizeof(real) == 8) return 0.5 * std::erfc(u * 0x1.6a09e667f3bcdp-1);
    // bell times a polynomial in t, fitted at Chebyshev's points of 0 < t <= 1; relative error 2e-8
    constexpr real fitted[] = {0.08976201463, 0.08976160413, 0.08523583757, 0.07581898067, 0.06593042868, 0.03364655416,
                               0.07684247783, -0.07365650302, 0.1194158882, -0.08021861825, 0.01746133579};
    const real t = 1 / (1 + real(0.225) * u);
    real series = 0;
    for (int i = 10; i >= 0; i--) series = series * t + fitted[i];
    return bell * series * t;
}

// --- linear maps: y = x W^T + b --------------------------------------------------------------------------------------

template <long out>
static void map(const real* w, Affine place, long in, const real* x, real* y, long T) {
    const real* bias = place.bias < 0 ? nullptr : w + place.bias;
    multiply(T, out, in, rows_of(x, in), transpose_of(w + place.weight, in), y, out, false, bias);
}
// From the slope dy of the map's output, that of its input.
static void map_backward(const real* w, Affine place, long out, long in, const real* dy, real* dx, long T) {
    multiply(T, in, out, rows_of(dy, out), rows_of(w + place.weight, in), dx, in, false);
}
// Adds to the gradients d of the map's weights.
template <long out>
static void map_weights_backward(real* d, Affine place, long in, const real* x, const real* dy, long T) {
    multiply(out, in, T, transpose_of(dy, out), rows_of(x, in), d + place.weight, in, true);
    if (place.bias < 0) return;
    real sums[out] = {};  // of a chunk, so that the sum of all tokens is rounded less often
    for (long t = 0; t < T; t++)
        for (long i = 0; i < out; i++) sums[i] += dy[t * out + i];
    for (long i = 0; i < out; i++) d[place.bias + i] += sums[i];
}

// --- norms -----------------------------------------------------------------------------------------------------------

struct KeptNorm {
    real *hat_TD, *scale_T;  // the normed tokens before the learned weight, and what they were multiplied by
};

// A norm that is missing changes nothing: its x_TD is y_TD.
static void norm(const real* w, Norm norm, const real* x_TD, real* y_TD, KeptNorm kept, long T) {
    if (norm.kind == NO_NORM) return;
    const real centred = norm.kind == LAYERNORM, numbers = norm.kind == L2NORM ? 1 : D, factor = norm.factor;
    for (long t = 0; t < T; t++) {
        const real* x = x_TD + t * D;
        real *hat = kept.hat_TD + t * D, *y = y_TD + t * D, mean = 0, square = 0;
#pragma omp simd reduction(+ : mean)
        for (long i = 0; i < D; i++) mean += x[i];
        mean *= centred / D;
#pragma omp simd reduction(+ : square)
        for (long i = 0; i < D; i++) square += (x[i] - mean) * (x[i] - mean);
        const real scale = kept.scale_T[t] = 1 / std::sqrt(square / numbers + real(1e-5));
        for (long i = 0; i < D; i++) hat[i] = (x[i] - mean) * scale;
        if (norm.weight < 0)
            for (long i = 0; i < D; i++) y[i] = hat[i] * factor;
        else if (norm.kind == L2NORM)
            for (long i = 0; i < D; i++) y[i] = hat[i] * w[norm.weight] * factor;
        else if (norm.shift < 0)
            for (long i = 0; i < D; i++) y[i] = hat[i] * w[norm.weight + i] * factor;
        else
            for (long i = 0; i < D; i++) y[i] = (hat[i] * w[norm.weight + i] + w[norm.shift + i]) * factor;
    }
}
// From the slope dy of the norm's output, the slope of its input, in place.
static void norm_backward(const real* w, real* d, Norm norm, KeptNorm kept, real* dy_TD, long T) {
    if (norm.kind == NO_NORM) return;
    const real centred = norm.kind == LAYERNORM, numbers = norm.kind == L2NORM ? 1 : D;
    real dweight[D] = {}, dshift[D] = {}, weight[D];
    for (long i = 0; i < D; i++) weight[i] = norm.weight < 0 ? 1 : w[norm.weight + (norm.kind == L2NORM ? 0 : i)];
    for (long t = 0; t < T; t++) {
        const real* hat = kept.hat_TD + t * D;
        real *dy = dy_TD + t * D, mean = 0, along = 0;
#pragma omp simd reduction(+ : mean, along)
        for (long i = 0; i < D; i++) {
            const real slope = dy[i] * real(norm.factor);
            dweight[i] += slope * hat[i];
            dshift[i] += slope;
            dy[i] = slope * weight[i];
            mean += dy[i];
            along += dy[i] * hat[i];
        }
        mean *= centred / D;
        along /= numbers;
        for (long i = 0; i < D; i++) dy[i] = kept.scale_T[t] * (dy[i] - mean - hat[i] * along);
    }
    for (long i = 0; i < D && norm.weight >= 0; i++) d[norm.weight + (norm.kind == L2NORM ? 0 : i)] += dweight[i];
    for (long i = 0; i < D && norm.shift >= 0; i++) d[norm.shift + i] += dshift[i];
}

// --- dropout: rankbench.seeds.random_bits, for any part of a stream --------------------------------------------------

struct Dropout {
    uint32_t factor, shift;
    int32_t last;  // the largest bits that are kept
    real scale;    // 1 / (share that is kept); 0: there is no dropout

    real mask(uint32_t place) const {
        uint32_t bits = place * factor + shift;
        bits = (bits ^ bits >> 16) * 0x7FEB352Du;
        bits = (bits ^ bits >> 15) * 0x846CA68Bu;
        return int32_t(bits) <= last ? scale : 0;
    }
    // Multiplies n numbers by their masks, which begin at a place in the stream.
    void apply(real* x, long n, long place) const {
        if (scale == 0) return;
        for (long i = 0; i < n; i++) x[i] *= mask(place + i);
    }
};

// --- attention -------------------------------------------------------------------------------------------------------

// L2 attention (rankbench/model/attention.py): its scores are 2 (q k - |k|^2 / 2), and its values are read from the
// queries, v = x U for U = W_Q W_Q^T W_V / sqrt(K). In the rows of a map's weights, that is U = (W_V W_Q^T) W_Q / sqrt(K).

static const real ROOT = 1 / std::sqrt(real(K));

// The rows U of all heads in place of the W_V of `weights`, in a copy of them.
static void values_of_queries(const real* weights_ED, real* copy_ED) {
    std::vector<real> products_VK(V * K);  // not on the stack, which they might exceed
    for (long h = 0; h < H; h++) {
        const real *q_KD = weights_ED + h * K * D, *v_VD = weights_ED + (E - J + h * V) * D;
        multiply(V, K, D, rows_of(v_VD, D), transpose_of(q_KD, D), products_VK.data(), K, false);
        for (real& x : products_VK) x *= ROOT;
        multiply(V, D, K, rows_of(products_VK.data(), K), rows_of(q_KD, D), copy_ED + (E - J + h * V) * D, D, false);
    }
}
// Turns the gradients of the rows U into those of W_V, and adds to those of W_Q.
static void values_of_queries_backward(const real* weights_ED, real* d_ED) {
    std::vector<real> products_VK(V * K), slopes_VK(V * K);
    for (long h = 0; h < H; h++) {
        const real *q_KD = weights_ED + h * K * D, *v_VD = weights_ED + (E - J + h * V) * D;
        real *dq_KD = d_ED + h * K * D, *dv_VD = d_ED + (E - J + h * V) * D;
        multiply(V, K, D, rows_of(v_VD, D), transpose_of(q_KD, D), products_VK.data(), K, false);
        multiply(V, K, D, rows_of(dv_VD, D), transpose_of(q_KD, D), slopes_VK.data(), K, false);
        for (real& x : products_VK) x *= ROOT;
        for (real& x : slopes_VK) x *= ROOT;
        multiply(K, D, V, transpose_of(products_VK.data(), K), rows_of(dv_VD, D), dq_KD, D, true);
        multiply(K, D, V, transpose_of(slopes_VK.data(), K), rows_of(v_VD, D), dq_KD, D, true);
        multiply(V, D, K, rows_of(slopes_VK.data(), K), rows_of(q_KD, D), dv_VD, D, false);
    }
}

// Contractive L2 attention divides its values by a bound, of which this is the part that depends on the weights
// (rankbench/model/contraction.py): a product of four largest sums of sizes, here with the places where they are.
struct Bound {
    real product, rows, columns, values, out;
    long head, input, query, value, output;
};
// Finds the row with the largest sum of sizes, from row `begin` to row `end`.
static void largest_row(const real* x, long begin, long end, long width, real& largest, long& row) {
    for (long i = begin; i < end; i++) {
        real sum = 0;
        for (long j = 0; j < width; j++) sum += std::abs(x[i * width + j]);
        if (sum > largest) largest = sum, row = i;
    }
}
static Bound bound_of(const real* weights_ED, const real* out_DJ) {
    Bound at{};
    for (long h = 0; h < H; h++) {
        real by_input[D] = {}, columns = 0;
        long query = 0;
        largest_row(weights_ED, h * K, (h + 1) * K, D, columns, query);
        for (long k = h * K; k < (h + 1) * K; k++)
            for (long i = 0; i < D; i++) by_input[i] += std::abs(weights_ED[k * D + i]);
        const long input = std::max_element(by_input, by_input + D) - by_input;
        if (by_input[input] * columns > at.rows * at.columns)
            at.rows = by_input[input], at.columns = columns, at.head = h, at.input = input, at.query = query;
    }
    largest_row(weights_ED, E - J, E, D, at.values, at.value);
    largest_row(out_DJ, 0, D, J, at.out, at.output);
    at.product = at.rows * at.columns * at.values * at.out;
    return at;
}
// slope: of the bound's logarithm.
static void bound_backward(Bound at, real slope, const real* weights_ED, const real* out_DJ, real* d_ED, real* dout_DJ) {
    const auto add = [](const real* x, real* dx, real slope) { *dx += *x > 0 ? slope : *x < 0 ? -slope : 0; };
    const auto add_row = [&](const real* x, real* dx, long row, long size, real slope) {
        for (long i = 0; i < size; i++) add(x + row * size + i, dx + row * size + i, slope);
    };
    for (long k = at.head * K; k < (at.head + 1) * K; k++)
        add(weights_ED + k * D + at.input, d_ED + k * D + at.input, slope / at.rows);
    add_row(weights_ED, d_ED, at.query, D, slope / at.columns);
    add_row(weights_ED, d_ED, at.value, D, slope / at.values);
    add_row(out_DJ, dout_DJ, at.output, J, slope / at.out);
}

// Some queries of a head, as rows n < R of its tables, whose rows lie N apart: they see none but the first M keys. A loop
// over all their numbers is one over `runs` runs of `length`.
constexpr long ROWS = 32;  // at most
struct Rows {
    long first, R, M;  // first: the first query

    long runs() const { return M == N ? 1 : R; }
    long length() const { return M == N ? R * N : M; }
};

// Takes half of each key's square off the products with it.
static void without_halves(Rows rows, const real* k_NK, real* s_RN) {
    for (long m = 0; m < rows.M; m++) {
        real square = 0;
#pragma omp simd reduction(+ : square)
        for (long i = 0; i < K; i++) square += k_NK[m * E + i] * k_NK[m * E + i];
        for (long n = 0; n < rows.R; n++) s_RN[n * N + m] -= square / 2;
    }
}
// Adds to the slopes dk of the keys what comes from their halves.
static void halves_backward(Rows rows, const real* k_NK, const real* ds_RN, real* dk_NK) {
    for (long m = 0; m < rows.M; m++) {
        real sum = 0;
        for (long n = 0; n < rows.R; n++) sum += ds_RN[n * N + m];
        for (long i = 0; i < K; i++) dk_NK[m * E + i] -= sum * k_NK[m * E + i];
    }
}
// The largest of some numbers that are not nan.
static real largest_of(const real* x, long number) {
    Vector most = Vector{} - real(INFINITY);
    real largest = -INFINITY;
    long i = 0;
    for (; i + LANES <= number; i += LANES) {
        const Vector part = *reinterpret_cast<const Anywhere*>(x + i);
        most = part > most ? part : most;
    }
    for (; i < number; i++) largest = x[i] > largest ? x[i] : largest;
    for (long lane = 0; lane < LANES; lane++) largest = most[lane] > largest ? most[lane] : largest;
    return largest;
}
// In place, of each row.
static void softmax(Rows rows, real* s_RN) {
    const long M = rows.M;
    for (long n = 0; n < rows.R; n++) {
        real* row = s_RN + n * N;
        const real largest = largest_of(row, M);
        for (long m = 0; m < M; m++) row[m] -= largest;
    }
    for (long run = 0; run < rows.runs(); run++)
        for (long i = 0; i < rows.length(); i++) s_RN[run * N + i] = exponential(s_RN[run * N + i]);
    for (long n = 0; n < rows.R; n++) {
        real *row = s_RN + n * N, sum = 0;
#pragma omp simd reduction(+ : sum)
        for (long m = 0; m < M; m++) sum += row[m];
        for (long m = 0; m < M; m++) row[m] /= sum;
    }
}
// From the slope of P to that of the scores, in place.
static void softmax_backward(Rows rows, const real* p_RN, real* slope_RN) {
    for (long n = 0; n < rows.R; n++) {
        const real* p = p_RN + n * N;
        real *slope = slope_RN + n * N, along = 0;
#pragma omp simd reduction(+ : along)
        for (long m = 0; m < rows.M; m++) along += slope[m] * p[m];
#pragma omp simd
        for (long m = 0; m < rows.M; m++) slope[m] = p[m] * (slope[m] - along);
    }
}

// --- activations -----------------------------------------------------------------------------------------------------

// The activation a of z, and its derivative.
static void activate(bool is_relu, const real* z, real* a, real* slope, long number) {
    if (is_relu)
        for (long i = 0; i < number; i++) {
            a[i] = z[i] <= 0 ? 0 : z[i];
            slope[i] = z[i] <= 0 ? 0 : 1;
        }
    else
        for (long i = 0; i < number; i++) {
            const real bell = exponential(real(-0.5) * z[i] * z[i]), tail = upper_tail(std::abs(z[i]), bell);
            const real below = z[i] > 0 ? 1 - tail : tail;
            a[i] = z[i] * below;
            slope[i] = below + z[i] * bell * real(0x1.9884533d43651p-2);  // 1 / sqrt(2 pi)
        }
}
