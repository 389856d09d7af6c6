// One step of training of a Transformer: forward pass, backward pass, clipping and optimiser, for several seeds.
//
// The seeds take their step one after the other, so that the weights of a seed stay in the cache. The sequences of a
// batch pass through the whole network a chunk at a time, so that the states of a chunk do. Matrix products are those
// of products.h; everything else is a loop whose bounds the compiler knows, from
//
//     REAL float or double    TOKENS    WIDTH    HEADS    HEAD_WIDTH    HIDDEN    OUTPUTS
//
// The sub-layers, norms, biases and factors of the network stand in the structures below, which fused_step.py fills. A
// sub-layer is, as in rankbench/model/network.py,
//
//     after(skip x + branch behind(f(before(x)))),
//
// where f is attention or an MLP and each of the three norms may be missing. Each part has its derivative next to it.
// Sums are reordered only where `omp simd reduction` says so, and no flag of the compiler assumes finite numbers: nan and
// infinity reach the loss.
//
// Shapes: B sequences of a chunk, T = B N their tokens, N query token, M key token, D width, H head, K head width,
// I = H K, F hidden width, C outputs, E = 3 I or F. Matrices are stored row by row.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

using real = REAL;
#include "products.h"

constexpr long N = TOKENS, D = WIDTH, H = HEADS, K = HEAD_WIDTH, I = H * K, F = HIDDEN, C = OUTPUTS;

// --- what the caller describes; every field has 8 bytes ---------------------------------------------------------------

// Where the numbers begin in the weights of a seed; -1: the part is missing.
struct Affine {
    long weight, bias;
};
struct Norm {
    long kind, weight, shift;
    double factor;
};
enum { NO_NORM, LAYERNORM, RMSNORM };

struct Sublayer {
    long is_mlp;
    Affine in, out;  // attention: to queries, keys and values, and from the heads; MLP: up and down
    Norm before, behind, after;
    double skip, branch;
};
struct Network {
    long num_weights;  // of a seed, with the gaps between them
    long num_sublayers;
    const Sublayer* sublayers;
    long reads_tokens, num_inputs, scores_classes;
    long is_padded;  // whether a sequence can end in absent tokens, which are negative
    Affine read_in, read_out;
    long position;         // learned; -1: none
    const real* sines_ND;  // fixed positions; null: none
    Norm embedding, last;
    double score_scale;
    const real* hidden_NM;  // 0, or -infinity for a key that the query does not see; null: it sees all
    long is_relu;
};
struct Batch {  // inputs and targets of all seeds, (S, B, N, ...)
    long num_seeds, num_sequences, chunk;
    const void *inputs, *targets;  // tokens or coordinates; classes or numbers
    const long* streams;           // factor and shift of each seed's stream of dropout's bits; null: no dropout
    long last_kept;                // the largest bits of an entry that dropout keeps
    double kept_scale;             // what dropout multiplies these by
};
struct Rule {
    long kind, count;  // count: number of this step, from 1
    double rate, weight_decay, momentum, beta1, beta2, epsilon, clip;  // clip: infinity for none
};
enum { GRADIENTS, SGD, ADAM, ADAMW };  // GRADIENTS: the weights stay

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
    if (place.bias >= 0)
        for (long t = 0; t < T; t++)
            for (long i = 0; i < out; i++) y[t * out + i] = w[place.bias + i];
    multiply(T, out, in, rows_of(x, in), transpose_of(w + place.weight, in), y, out, place.bias >= 0);
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
    real sums[out];
    std::copy_n(d + place.bias, out, sums);
    for (long t = 0; t < T; t++)
        for (long i = 0; i < out; i++) sums[i] += dy[t * out + i];
    std::copy_n(sums, out, d + place.bias);
}

// --- norms -----------------------------------------------------------------------------------------------------------

struct KeptNorm {
    real *hat_TD, *scale_T;  // the normed tokens before the learned weight, and what they were multiplied by
};

static void norm(const real* w, Norm norm, const real* x_TD, real* y_TD, KeptNorm kept, long T) {
    const real centred = norm.kind == LAYERNORM, factor = norm.factor;
    for (long t = 0; t < T; t++) {
        const real* x = x_TD + t * D;
        real *hat = kept.hat_TD + t * D, *y = y_TD + t * D, mean = 0, square = 0;
#pragma omp simd reduction(+ : mean)
        for (long i = 0; i < D; i++) mean += x[i];
        mean *= centred / D;
#pragma omp simd reduction(+ : square)
        for (long i = 0; i < D; i++) square += (x[i] - mean) * (x[i] - mean);
        const real scale = kept.scale_T[t] = 1 / std::sqrt(square / D + real(1e-5));
        for (long i = 0; i < D; i++) hat[i] = (x[i] - mean) * scale;
        if (norm.weight < 0)
            for (long i = 0; i < D; i++) y[i] = hat[i] * factor;
        else if (norm.shift < 0)
            for (long i = 0; i < D; i++) y[i] = hat[i] * w[norm.weight + i] * factor;
        else
            for (long i = 0; i < D; i++) y[i] = (hat[i] * w[norm.weight + i] + w[norm.shift + i]) * factor;
    }
}
// From the slope dy of the norm's output, the slope of its input, in place.
static void norm_backward(const real* w, real* d, Norm norm, KeptNorm kept, real* dy_TD, long T) {
    const real centred = norm.kind == LAYERNORM;
    real dweight[D] = {}, dshift[D] = {}, weight[D];
    for (long i = 0; i < D; i++) weight[i] = norm.weight < 0 ? 1 : w[norm.weight + i];
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
        along /= D;
        for (long i = 0; i < D; i++) dy[i] = kept.scale_T[t] * (dy[i] - mean - hat[i] * along);
    }
    for (long i = 0; i < D && norm.weight >= 0; i++) d[norm.weight + i] += dweight[i];
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

// tokens: of the chunk; null if none can be absent. place: of the masks of the chunk's attention weights.
static void attend(const Network& net, const int64_t* tokens, const real* qkv_TE, real* p_BHNM, real* mixed_TI, long B,
                   Dropout dropout, long place) {
    for (long b = 0; b < B; b++)
        for (long h = 0; h < H; h++) {
            const real *q_NK = qkv_TE + b * N * 3 * I + h * K, *k_NK = q_NK + I, *v_NK = k_NK + I;
            const long head = (b * H + h) * N * N;
            real kept_NM[N * N], *p_NM = p_BHNM + head;
            multiply(N, N, K, rows_of(q_NK, 3 * I), transpose_of(k_NK, 3 * I), p_NM, N, false);
            for (long i = 0; i < N * N; i++) p_NM[i] *= real(net.score_scale);
            for (long i = 0; i < N * N && net.hidden_NM; i++) p_NM[i] += net.hidden_NM[i];
            for (long m = 0; m < N && tokens; m++)  // no token sees an absent one, except that one itself
                for (long n = 0; n < N && tokens[b * N + m] < 0; n++)
                    if (n != m) p_NM[n * N + m] = -INFINITY;
            for (long n = 0; n < N; n++) {
                real *row = p_NM + n * N, largest = -INFINITY;
#pragma omp simd reduction(max : largest)
                for (long m = 0; m < N; m++) largest = std::max(largest, row[m]);
                for (long m = 0; m < N; m++) row[m] -= largest;
            }
            for (long i = 0; i < N * N; i++) p_NM[i] = exponential(p_NM[i]);
            for (long n = 0; n < N; n++) {
                real *row = p_NM + n * N, sum = 0;
#pragma omp simd reduction(+ : sum)
                for (long m = 0; m < N; m++) sum += row[m];
                for (long m = 0; m < N; m++) row[m] /= sum;
            }
            std::copy_n(p_NM, N * N, kept_NM);
            dropout.apply(kept_NM, N * N, place + head);
            multiply(N, K, N, rows_of(kept_NM, N), rows_of(v_NK, 3 * I), mixed_TI + b * N * I + h * K, I, false);
        }
}
static void attend_backward(const Network& net, const real* qkv_TE, const real* p_BHNM, const real* dmixed_TI,
                            real* dqkv_TE, long B, Dropout dropout, long place) {
    for (long b = 0; b < B; b++)
        for (long h = 0; h < H; h++) {
            const real *q_NK = qkv_TE + b * N * 3 * I + h * K, *k_NK = q_NK + I, *v_NK = k_NK + I;
            const real* dmixed_NK = dmixed_TI + b * N * I + h * K;
            real *dq_NK = dqkv_TE + b * N * 3 * I + h * K, *dk_NK = dq_NK + I, *dv_NK = dk_NK + I;
            const long head = (b * H + h) * N * N;
            real slope_NM[N * N], kept_NM[N * N];
            multiply(N, N, K, rows_of(dmixed_NK, I), transpose_of(v_NK, 3 * I), slope_NM, N, false);
            std::copy_n(p_BHNM + head, N * N, kept_NM);
            dropout.apply(kept_NM, N * N, place + head);
            dropout.apply(slope_NM, N * N, place + head);
            for (long n = 0; n < N; n++) {
                const real* p = p_BHNM + head + n * N;
                real *slope = slope_NM + n * N, along = 0;
#pragma omp simd reduction(+ : along)
                for (long m = 0; m < N; m++) along += slope[m] * p[m];
                for (long m = 0; m < N; m++) slope[m] = p[m] * (slope[m] - along) * real(net.score_scale);
            }
            multiply(N, K, N, rows_of(slope_NM, N), rows_of(k_NK, 3 * I), dq_NK, 3 * I, false);
            multiply(N, K, N, transpose_of(slope_NM, N), rows_of(q_NK, 3 * I), dk_NK, 3 * I, false);
            multiply(N, K, N, transpose_of(kept_NM, N), rows_of(dmixed_NK, I), dv_NK, 3 * I, false);
        }
}

// --- activations -----------------------------------------------------------------------------------------------------

// The activation a of z, and its derivative.
static void activate(const Network& net, const real* z, real* a, real* slope, long number) {
    if (net.is_relu)
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

// --- one seed ----------------------------------------------------------------------------------------------------------

struct KeptSublayer {  // for the backward pass; mixed: values of the heads, (T, I), or the activation of an MLP, (T, F)
    real *x_TD, *read_TD, *in_TE, *mixed, *slope_TF, *p_BHNM;
    KeptNorm before, behind, after;
    long place_of_weights, place_of_output;  // in the stream of dropout's bits
};

struct Score {
    double loss, right, tokens;
};

class Seed {
  public:
    // Lays out the arrays of a chunk in `memory`; with null, only to find their `size`.
    Seed(const Network& network, const Batch& of_seeds, real* memory)
        : net(network), batch(of_seeds), kept(network.num_sublayers) {
        const long T = batch.chunk * N;
        const auto take = [&](long number) {
            real* begin = memory ? memory + size : nullptr;
            size += (number + 15) / 16 * 16;  // so that every array begins at a multiple of 64 bytes
            return begin;
        };
        const auto take_norm = [&](Norm norm) {
            return norm.kind == NO_NORM ? KeptNorm{} : KeptNorm{take(T * D), take(T)};
        };
        long place = batch.num_sequences * N * D;  // the order is that of Transformer.dropout_shapes
        for (long s = 0; s < net.num_sublayers; s++) {
            const Sublayer& sublayer = net.sublayers[s];
            kept[s].x_TD = take(T * D);
            kept[s].read_TD = sublayer.before.kind == NO_NORM ? kept[s].x_TD : take(T * D);
            kept[s].in_TE = take(T * (sublayer.is_mlp ? F : 3 * I));
            kept[s].mixed = take(T * (sublayer.is_mlp ? F : I));
            if (sublayer.is_mlp) {
                kept[s].slope_TF = take(T * F);
            } else {
                kept[s].p_BHNM = take(batch.chunk * H * N * N);
                kept[s].place_of_weights = place;
                place += batch.num_sequences * H * N * N;
            }
            kept[s].place_of_output = place;
            place += batch.num_sequences * N * D;
            kept[s].before = take_norm(sublayer.before);
            kept[s].behind = take_norm(sublayer.behind);
            kept[s].after = take_norm(sublayer.after);
        }
        embedding = take_norm(net.embedding);
        last = take_norm(net.last);
        x_TD = take(T * D);
        y_TD = take(T * D);
        dx_TD = take(T * D);
        dmixed = take(T * std::max(I, F));
        din_TE = take(T * std::max(3 * I, F));
        outputs_TC = take(T * C);
    }
    long size = 0;

    // The score of one seed on its batch, and in d_weights the gradients of its mean loss.
    Score gradients(const real* weights, real* d_weights, long seed) {
        w = weights, d = d_weights;
        std::memset(d, 0, net.num_weights * sizeof(real));
        if (batch.streams) dropout = {uint32_t(batch.streams[2 * seed]), uint32_t(batch.streams[2 * seed + 1]),
                                      int32_t(batch.last_kept), real(batch.kept_scale)};
        const long tokens = batch.num_sequences * N, first = seed * tokens;
        Score score{0, net.scores_classes ? 0.0 : NAN, 0};
        for (long t = 0; t < tokens; t++) score.tokens += is_scored(first + t);
        for (start = 0; start < batch.num_sequences; start += batch.chunk) {
            B = std::min(batch.chunk, batch.num_sequences - start), T = B * N;
            const long token = first + start * N;  // the chunk's first, among those of all seeds
            embed(token);
            for (long s = 0; s < net.num_sublayers; s++) forward(s, net.is_padded ? token_inputs(token) : nullptr);
            if (net.last.kind != NO_NORM) norm(w, net.last, x_TD, x_TD, last, T);
            map<C>(w, net.read_out, D, x_TD, outputs_TC, T);
            net.scores_classes ? cross_entropy(token, score) : squared_error(token, score);
            map_weights_backward<C>(d, net.read_out, D, x_TD, outputs_TC, T);
            map_backward(w, net.read_out, C, D, outputs_TC, dx_TD, T);
            if (net.last.kind != NO_NORM) norm_backward(w, d, net.last, last, dx_TD, T);
            for (long s = net.num_sublayers - 1; s >= 0; s--) backward(s);
            embed_backward(token);
        }
        return score;
    }

  private:
    const Network& net;
    const Batch& batch;
    const real* w;
    real* d;
    Dropout dropout{};
    long start, B, T;  // of the chunk: its first sequence, its number of sequences and of tokens
    std::vector<KeptSublayer> kept;
    KeptNorm embedding, last;
    real *x_TD, *y_TD, *dx_TD, *dmixed, *din_TE, *outputs_TC;  // dx: the slope of the last state that is not yet done

    const int64_t* token_inputs(long token) const { return static_cast<const int64_t*>(batch.inputs) + token; }
    const real* coordinates(long token) const { return static_cast<const real*>(batch.inputs) + token * net.num_inputs; }
    long embedding_of(long token) const { return net.read_in.weight + std::max(*token_inputs(token), int64_t(0)) * D; }
    int64_t target_class(long token) const { return static_cast<const int64_t*>(batch.targets)[token]; }
    const real* target_numbers(long token) const { return static_cast<const real*>(batch.targets) + token * C; }
    bool is_scored(long token) const {
        if (net.scores_classes) return target_class(token) >= 0;
        const real* numbers = target_numbers(token);
        return std::none_of(numbers, numbers + C, [](real x) { return std::isnan(x); });
    }
    real* state_after(long s) const { return s + 1 < net.num_sublayers ? kept[s + 1].x_TD : x_TD; }

    void embed(long token) {
        real* x = state_after(-1);
        if (net.reads_tokens)
            for (long t = 0; t < T; t++) std::copy_n(w + embedding_of(token + t), D, x + t * D);
        else
            map<D>(w, net.read_in, net.num_inputs, coordinates(token), x, T);
        const real* positions_ND = net.position >= 0 ? w + net.position : net.sines_ND;
        for (long t = 0; t < T && positions_ND; t++)
            for (long i = 0; i < D; i++) x[t * D + i] += positions_ND[t % N * D + i];
        if (net.embedding.kind != NO_NORM) norm(w, net.embedding, x, x, embedding, T);
        dropout.apply(x, T * D, start * N * D);
    }
    void embed_backward(long token) {
        dropout.apply(dx_TD, T * D, start * N * D);
        if (net.embedding.kind != NO_NORM) norm_backward(w, d, net.embedding, embedding, dx_TD, T);
        for (long t = 0; t < T && net.position >= 0; t++)
            for (long i = 0; i < D; i++) d[net.position + t % N * D + i] += dx_TD[t * D + i];
        if (!net.reads_tokens) return map_weights_backward<D>(d, net.read_in, net.num_inputs, coordinates(token), dx_TD, T);
        for (long t = 0; t < T; t++) {
            real* row = d + embedding_of(token + t);
            for (long i = 0; i < D; i++) row[i] += dx_TD[t * D + i];
        }
    }

    void forward(long s, const int64_t* tokens) {
        const Sublayer& sub = net.sublayers[s];
        const KeptSublayer& k = kept[s];
        if (sub.before.kind != NO_NORM) norm(w, sub.before, k.x_TD, k.read_TD, k.before, T);
        if (sub.is_mlp) {
            map<F>(w, sub.in, D, k.read_TD, k.in_TE, T);
            activate(net, k.in_TE, k.mixed, k.slope_TF, T * F);
            map<D>(w, sub.out, F, k.mixed, y_TD, T);
        } else {
            map<3 * I>(w, sub.in, D, k.read_TD, k.in_TE, T);
            attend(net, tokens, k.in_TE, k.p_BHNM, k.mixed, B, dropout, k.place_of_weights + start * H * N * N);
            map<D>(w, sub.out, I, k.mixed, y_TD, T);
        }
        dropout.apply(y_TD, T * D, k.place_of_output + start * N * D);
        if (sub.behind.kind != NO_NORM) norm(w, sub.behind, y_TD, y_TD, k.behind, T);
        real* sum_TD = state_after(s);
        const real skip = sub.skip, branch = sub.branch;
        if (skip == 0)  // not even a nan is carried past the sub-layer
            for (long i = 0; i < T * D; i++) sum_TD[i] = branch * y_TD[i];
        else
            for (long i = 0; i < T * D; i++) sum_TD[i] = skip * k.x_TD[i] + branch * y_TD[i];
        if (sub.after.kind != NO_NORM) norm(w, sub.after, sum_TD, sum_TD, k.after, T);
    }
    // Turns dx from the slope of the sub-layer's output into that of its input.
    void backward(long s) {
        const Sublayer& sub = net.sublayers[s];
        const KeptSublayer& k = kept[s];
        if (sub.after.kind != NO_NORM) norm_backward(w, d, sub.after, k.after, dx_TD, T);
        for (long i = 0; i < T * D; i++) y_TD[i] = real(sub.branch) * dx_TD[i];
        if (sub.behind.kind != NO_NORM) norm_backward(w, d, sub.behind, k.behind, y_TD, T);
        dropout.apply(y_TD, T * D, k.place_of_output + start * N * D);
        const long inner = sub.is_mlp ? F : I, wide = sub.is_mlp ? F : 3 * I;
        map_weights_backward<D>(d, sub.out, inner, k.mixed, y_TD, T);
        map_backward(w, sub.out, D, inner, y_TD, dmixed, T);
        if (sub.is_mlp) {
            for (long i = 0; i < T * F; i++) din_TE[i] = dmixed[i] * k.slope_TF[i];
            map_weights_backward<F>(d, sub.in, D, k.read_TD, din_TE, T);
        } else {
            attend_backward(net, k.in_TE, k.p_BHNM, dmixed, din_TE, B, dropout,
                            k.place_of_weights + start * H * N * N);
            map_weights_backward<3 * I>(d, sub.in, D, k.read_TD, din_TE, T);
        }
        map_backward(w, sub.in, wide, D, din_TE, y_TD, T);
        if (sub.before.kind != NO_NORM) norm_backward(w, d, sub.before, k.before, y_TD, T);
        for (long i = 0; i < T * D; i++) dx_TD[i] = real(sub.skip) * dx_TD[i] + y_TD[i];
    }

    // Adds to the score, and turns the outputs of the chunk into their slopes.
    void cross_entropy(long token, Score& score) {
        for (long t = 0; t < T; t++) {
            real *row = outputs_TC + t * C, sum = 0;
            const long target = target_class(token + t), best = std::max_element(row, row + C) - row;
            if (target < 0) {
                std::fill_n(row, C, real(0));
                continue;
            }
            const real largest = row[best], own = row[target] - largest;
#pragma omp simd reduction(+ : sum)
            for (long c = 0; c < C; c++) sum += row[c] = exponential(row[c] - largest);
            score.loss += std::log(sum) - own;
            score.right += best == target;
            for (long c = 0; c < C; c++) row[c] = (row[c] / sum - (c == target)) / real(score.tokens);
        }
    }
    void squared_error(long token, Score& score) {
        for (long t = 0; t < T; t++) {
            real* row = outputs_TC + t * C;
            const bool scored = is_scored(token + t);
            for (long c = 0; c < C; c++) {
                const real error = scored ? row[c] - target_numbers(token + t)[c] : 0;
                score.loss += error * error / C;
                row[c] = 2 * error / (C * real(score.tokens));
            }
        }
    }
};

// --- clipping and the optimiser ----------------------------------------------------------------------------------------

// first, second: the moments; those that the rule does not have are not read.
static void update(const Rule& rule, long number, real* w, const real* d, real* first, real* second) {
    real factor = 1;
    if (!std::isinf(rule.clip)) {
        double square = 0;
#pragma omp simd reduction(+ : square)
        for (long i = 0; i < number; i++) square += double(d[i]) * d[i];
        const double over = rule.clip / std::sqrt(square);
        factor = over > 1 ? 1 : over;  // nan stays nan
    }
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
    const real rate1 = rule.rate / (1 - std::pow(rule.beta1, rule.count));
    const real root2 = std::sqrt(1 - std::pow(rule.beta2, rule.count));
    const real coupled = rule.kind == ADAM ? decay : 0, shrinking = rule.kind == ADAMW ? 1 - rule.rate * rule.weight_decay : 1;
    for (long i = 0; i < number; i++) {
        const real slope = d[i] * factor + coupled * w[i];
        first[i] = beta1 * first[i] + (1 - beta1) * slope;
        second[i] = beta2 * second[i] + (1 - beta2) * slope * slope;
        w[i] = shrinking * w[i] - rate1 * first[i] / (std::sqrt(second[i]) / root2 + epsilon);
    }
}

// --- what the library offers -------------------------------------------------------------------------------------------

// How many numbers `step` needs as its memory.
extern "C" long memory_of_step(const Network* network, const Batch* batch) {
    return Seed(*network, *batch, nullptr).size;
}

// The product of products.h, for tests and for the benchmark.
extern "C" void product(long M, long N, long K, const Matrix* a, const Matrix* b, real* c, long adds) {
    multiply(M, N, K, *a, *b, c, N, adds);
}

// Takes a step with every seed: weights and moments (S, num_weights); gradients the same, or one row for a seed after the
// other if `shares_gradients`; scores (S, 3). memory and all rows begin at a multiple of 64 bytes.
extern "C" void step(const Network* network, const Batch* batch, const Rule* rule, real* weights, real* gradients,
                     long shares_gradients, real* first, real* second, double* scores, real* memory) {
    Seed seed(*network, *batch, memory);
    for (long s = 0; s < batch->num_seeds; s++) {
        const long from = s * network->num_weights;
        real* d = gradients + (shares_gradients ? 0 : from);
        const Score score = seed.gradients(weights + from, d, s);
        scores[3 * s] = score.loss, scores[3 * s + 1] = score.right, scores[3 * s + 2] = score.tokens;
        if (rule->kind != GRADIENTS)
            update(*rule, network->num_weights, weights + from, d, first ? first + from : nullptr,
                   second ? second + from : nullptr);
    }
}
