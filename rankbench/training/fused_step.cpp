// One step of training of a Transformer: forward pass, backward pass, clipping and optimiser, for several seeds.
//
// Each thread takes one seed after the other, so that the weights of a seed stay in the cache; where there are more
// threads than seeds, each takes a part of a seed's sequences. These pass through the whole network a chunk at a time, so
// that the states of a chunk stay there too. Matrix products are those of products.h; everything else, in parts.h,
// update.h and here, is a loop whose bounds the compiler knows, from
//
//     REAL float or double    WIDTH    HEADS    HEAD_WIDTH    HIDDEN    OUTPUTS    SHARED 1 if keys are the queries, else 0
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
// Shapes: B sequences of a chunk, T = B N their tokens, N query token, M key token, D width, H head, K head width,
// I = H K, E of all queries, keys and values, F hidden width, C outputs. Matrices are stored row by row.

using real = REAL;
#include "network.h"
#include "threads.h"
#include "update.h"

// --- one seed ----------------------------------------------------------------------------------------------------------

struct KeptSublayer {  // for the backward pass; mixed: values of the heads, (T, I), or the activation of an MLP, (T, F)
    real *x_TD, *read_TD, *in_TE, *mixed, *slope_TF, *p_BHNM;
    KeptNorm before, behind, after;
    long place_of_weights, place_of_output;  // in the stream of dropout's bits
    Bound bound;                             // of contractive L2, and the slope of its logarithm
    real slope_of_bound;
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
            kept[s].in_TE = take(T * (sublayer.is_mlp ? F : E));
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
        din_TE = take(T * std::max(E, F));
        outputs_TC = take(T * C);
        dropped_NM = take(N * N);
        slope_NM = take(N * N);
        as_applied = take(net.is_l2 ? net.num_weights : 0);
    }
    long size = 0;

    // The score of one seed on its sequences from `begin` to `end`, and in d_weights their part of the gradients of its
    // mean loss on the whole batch, whose tokens are those of the score.
    Score gradients(const real* weights, real* d_weights, long seed, long begin, long end) {
        w = weights, d = d_weights;
        std::memset(d, 0, net.num_weights * sizeof(real));
        if (net.is_l2) {
            std::copy_n(weights, net.num_weights, as_applied);
            each_attention([&](KeptSublayer& sub, long in, long out) {
                values_of_queries(weights + in, as_applied + in);
                if (net.contraction) sub.bound = bound_of(weights + in, weights + out), sub.slope_of_bound = 0;
            });
            w = as_applied;
        }
        if (batch.streams) dropout = {uint32_t(batch.streams[2 * seed]), uint32_t(batch.streams[2 * seed + 1]),
                                      int32_t(batch.last_kept), real(batch.kept_scale)};
        const long tokens = batch.num_sequences * N, first = seed * tokens;
        Score score{0, net.scores_classes ? 0.0 : NAN, 0};
        for (long t = 0; t < tokens; t++) score.tokens += is_scored(first + t);
        for (start = begin; start < end; start += batch.chunk) {
            B = std::min(batch.chunk, end - start), T = B * N;
            const long token = first + start * N;  // the chunk's first, among those of all seeds
            embed(token);
            const int64_t* tokens = net.is_padded ? token_inputs(token) : nullptr;
            for (long s = 0; s < net.num_sublayers; s++) forward(s, tokens);
            if (net.last.kind != NO_NORM) norm(w, net.last, x_TD, x_TD, last, T);
            map<C>(w, net.read_out, D, x_TD, outputs_TC, T);
            net.scores_classes ? cross_entropy(token, score) : squared_error(token, score);
            map_weights_backward<C>(d, net.read_out, D, x_TD, outputs_TC, T);
            map_backward(w, net.read_out, C, D, outputs_TC, dx_TD, T);
            if (net.last.kind != NO_NORM) norm_backward(w, d, net.last, last, dx_TD, T);
            for (long s = net.num_sublayers - 1; s >= 0; s--) backward(s, tokens);
            embed_backward(token);
        }
        if (net.is_l2)
            each_attention([&](KeptSublayer& sub, long in, long out) {
                values_of_queries_backward(weights + in, d + in);
                if (net.contraction)
                    bound_backward(sub.bound, sub.slope_of_bound, weights + in, weights + out, d + in, d + out);
            });
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
    // dx: the slope of the last state that is not yet done. as_applied: all weights, for l2.
    real *x_TD, *y_TD, *dx_TD, *dmixed, *din_TE, *outputs_TC, *dropped_NM, *slope_NM, *as_applied;

    // Calls a function with each attention sub-layer and the places of its two maps.
    template <class Function>
    void each_attention(Function function) {
        for (long s = 0; s < net.num_sublayers; s++)
            if (!net.sublayers[s].is_mlp) function(kept[s], net.sublayers[s].in.weight, net.sublayers[s].out.weight);
    }
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

    // Where one of the chunk's heads has its queries, keys and values, its table P and its outputs.
    struct Head {
        long queries, keys, values, table, outputs;
    };
    static Head place_of(long head) {
        const long b = head / H, h = head % H, queries = b * N * E + h * K;
        return {queries, queries + E - 2 * I, queries + E - I, head * N * N, b * N * I + h * K};
    }
    // tokens: of the chunk; null if none can be absent.
    void attend(const KeptSublayer& kept, long head, const int64_t* tokens) {
        const Head at = place_of(head);
        const real *k_NK = kept.in_TE + at.keys;
        real* p_NM = kept.p_BHNM + at.table;
        multiply(N, N, K, rows_of(kept.in_TE + at.queries, E), transpose_of(k_NK, E), p_NM, N, false);
        if (net.is_l2) without_halves(k_NK, p_NM);
        for (long i = 0; i < N * N; i++) p_NM[i] *= real(net.score_scale);
        for (long i = 0; i < N * N && net.hidden_NM; i++) p_NM[i] += net.hidden_NM[i];
        const int64_t* own = tokens ? tokens + head / H * N : nullptr;
        for (long m = 0; m < N && own; m++)  // no token sees an absent one, except that one itself
            for (long n = 0; n < N && own[m] < 0; n++)
                if (n != m) p_NM[n * N + m] = -INFINITY;
        softmax(p_NM);
        multiply(N, K, N, rows_of(dropped(kept, at.table), N), rows_of(kept.in_TE + at.values, E), kept.mixed + at.outputs, I,
                 false);
    }
    void attend_backward(const KeptSublayer& kept, long head) {
        const Head at = place_of(head);
        const real *q_NK = kept.in_TE + at.queries, *k_NK = kept.in_TE + at.keys, *dmixed_NK = dmixed + at.outputs;
        multiply(N, N, K, rows_of(dmixed_NK, I), transpose_of(kept.in_TE + at.values, E), slope_NM, N, false);
        dropout.apply(slope_NM, N * N, kept.place_of_weights + start * H * N * N + at.table);
        softmax_backward(kept.p_BHNM + at.table, slope_NM);
        for (long i = 0; i < N * N; i++) slope_NM[i] *= real(net.score_scale);
        multiply(N, K, N, rows_of(slope_NM, N), rows_of(k_NK, E), din_TE + at.queries, E, false);
        multiply(N, K, N, transpose_of(slope_NM, N), rows_of(q_NK, E), din_TE + at.keys, E, SHARED);
        if (net.is_l2) halves_backward(k_NK, slope_NM, din_TE + at.keys);
        multiply(N, K, N, transpose_of(dropped(kept, at.table), N), rows_of(dmixed_NK, I), din_TE + at.values, E, false);
    }
    // Divides the outputs of all heads, (T, I), or their slopes, by the bound of their sequence.
    void contract(const KeptSublayer& kept, real* x_TI, const int64_t* tokens) {
        for (long b = 0; b < B; b++) {
            long present = tokens ? 0 : N;
            for (long n = b * N; n < (b + 1) * N && tokens; n++) present += tokens[n] >= 0;
            const real inverse = net.inverses[std::max(present, 1L) - 1];
            const real factor = real(net.contraction) / ((4 * inverse + ROOT) * kept.bound.product);
            for (long i = b * N * I; i < (b + 1) * N * I; i++) x_TI[i] *= factor;
        }
    }
    // P of a head after dropout.
    const real* dropped(const KeptSublayer& kept, long table) {
        if (dropout.scale == 0) return kept.p_BHNM + table;
        std::copy_n(kept.p_BHNM + table, N * N, dropped_NM);
        dropout.apply(dropped_NM, N * N, kept.place_of_weights + start * H * N * N + table);
        return dropped_NM;
    }

    void forward(long s, const int64_t* tokens) {
        const Sublayer& sub = net.sublayers[s];
        const KeptSublayer& k = kept[s];
        if (sub.before.kind != NO_NORM) norm(w, sub.before, k.x_TD, k.read_TD, k.before, T);
        if (sub.is_mlp) {
            map<F>(w, sub.in, D, k.read_TD, k.in_TE, T);
            activate(net.is_relu, k.in_TE, k.mixed, k.slope_TF, T * F);
            map<D>(w, sub.out, F, k.mixed, y_TD, T);
        } else {
            map<E>(w, sub.in, D, k.read_TD, k.in_TE, T);
            for (long head = 0; head < B * H; head++) attend(k, head, tokens);
            if (net.contraction) contract(k, k.mixed, tokens);
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
    void backward(long s, const int64_t* tokens) {
        const Sublayer& sub = net.sublayers[s];
        KeptSublayer& k = kept[s];
        if (sub.after.kind != NO_NORM) norm_backward(w, d, sub.after, k.after, dx_TD, T);
        for (long i = 0; i < T * D; i++) y_TD[i] = real(sub.branch) * dx_TD[i];
        if (sub.behind.kind != NO_NORM) norm_backward(w, d, sub.behind, k.behind, y_TD, T);
        dropout.apply(y_TD, T * D, k.place_of_output + start * N * D);
        const long inner = sub.is_mlp ? F : I, wide = sub.is_mlp ? F : E;
        map_weights_backward<D>(d, sub.out, inner, k.mixed, y_TD, T);
        map_backward(w, sub.out, D, inner, y_TD, dmixed, T);
        if (sub.is_mlp) {
            for (long i = 0; i < T * F; i++) din_TE[i] = dmixed[i] * k.slope_TF[i];
            map_weights_backward<F>(d, sub.in, D, k.read_TD, din_TE, T);
        } else {
            if (net.contraction) {
                for (long i = 0; i < T * I; i++) k.slope_of_bound -= dmixed[i] * k.mixed[i];
                contract(k, dmixed, tokens);
            }
            for (long head = 0; head < B * H; head++) attend_backward(k, head);
            map_weights_backward<E>(d, sub.in, D, k.read_TD, din_TE, T);
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

// --- what the library offers -------------------------------------------------------------------------------------------

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

// The product of products.h, for tests and for the benchmark.
extern "C" void product(long M, long N, long K, const Matrix* a, const Matrix* b, real* c, long adds) {
    multiply(M, N, K, *a, *b, c, N, adds);
}

// Takes a step with every seed: weights and moments (S, num_weights); scores (S, 3). gradients: one row for each part of
// each seed, (parts, S, num_weights), of which those of the first part become the seed's; or only one for each thread, if
// `of_threads`, which needs a rule and seeds that are not in parts. memory: for each thread. All rows begin at a multiple
// of 64 bytes.
extern "C" void step(const Network* network, const Batch* batch, const Rule* rule, real* weights, real* gradients,
                     long of_threads, real* first, real* second, double* scores, real* memory) {
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
        scores[3 * seed] = score.loss, scores[3 * seed + 1] = score.right, scores[3 * seed + 2] = score.tokens;
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
