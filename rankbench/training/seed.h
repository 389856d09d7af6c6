// One seed: its network forward and backward, chunk after chunk, from the weights to their gradients. Shapes are those of
// fused_step.cpp, which includes this file.

#include "network.h"

struct KeptSublayer {  // for the backward pass; mixed: values of the heads, (T, J), or the activation of an MLP, (T, F)
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
            kept[s].mixed = take(T * (sublayer.is_mlp ? F : J));
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
        dmixed = take(T * std::max(J, F));
        din_TE = take(T * std::max(E, F));
        outputs_TC = take(T * C);
        dropped_NM = take(N * N);
        slope_NM = take(N * N);
        read_in_TD = take(net.read_in_down.weight < 0 ? 0 : T * D);
        read_in_slope_TD = take(net.read_in_down.weight < 0 ? 0 : T * D);
        as_applied = take(net.is_l2 ? net.num_weights : 0);
    }
    long size = 0;

    // The score of one seed on its sequences from `begin` to `end`, and in d_weights their part of the gradients of its
    // mean loss on the whole batch, whose tokens are those of the score.
    Score gradients(const real* weights, real* d_weights, long seed, long begin, long end) {
        w = weights, d = d_weights;
        count_seen();
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
            norm(w, net.last, x_TD, x_TD, last, T);
            read_out();
            net.scores_classes ? cross_entropy(token, score) : squared_error(token, score);
            read_out_backward();
            norm_backward(w, d, net.last, last, dx_TD, T);
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
    std::vector<long> num_seen;
    long start, B, T;  // of the chunk: its first sequence, its number of sequences and of tokens
    std::vector<KeptSublayer> kept;
    KeptNorm embedding, last;
    // dx: the slope of the last state that is not yet done. read_in: the activation of an MLP that reads in, and its
    // derivative. as_applied: all weights, for l2.
    real *x_TD, *y_TD, *dx_TD, *dmixed, *din_TE, *outputs_TC, *dropped_NM, *slope_NM, *read_in_TD, *read_in_slope_TD,
        *as_applied;

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
            read_in(coordinates(token), x);
        const real* positions_ND = net.position >= 0 ? w + net.position : net.sines_ND;
        for (long t = 0; t < T && positions_ND; t++)
            for (long i = 0; i < D; i++) x[t * D + i] += positions_ND[t % N * D + i];
        norm(w, net.embedding, x, x, embedding, T);
        dropout.apply(x, T * D, start * N * D);
    }
    void embed_backward(long token) {
        dropout.apply(dx_TD, T * D, start * N * D);
        norm_backward(w, d, net.embedding, embedding, dx_TD, T);
        for (long t = 0; t < T && net.position >= 0; t++)
            for (long i = 0; i < D; i++) d[net.position + t % N * D + i] += dx_TD[t * D + i];
        if (!net.reads_tokens) return read_in_backward(coordinates(token));
        for (long t = 0; t < T; t++) {
            real* row = d + embedding_of(token + t);
            for (long i = 0; i < D; i++) row[i] += dx_TD[t * D + i];
        }
    }

    void read_in(const real* coordinates, real* x) {
        if (net.read_in.weight < 0) {
            std::copy_n(coordinates, T * D, x);
        } else if (net.read_in_down.weight < 0) {
            map<D>(w, net.read_in, net.num_inputs, coordinates, x, T);
        } else {
            map<D>(w, net.read_in, net.num_inputs, coordinates, y_TD, T);
            activate(net.is_relu, y_TD, read_in_TD, read_in_slope_TD, T * D);
            map<D>(w, net.read_in_down, D, read_in_TD, x, T);
        }
    }
    void read_in_backward(const real* coordinates) {
        if (net.read_in.weight < 0) return;
        if (net.read_in_down.weight >= 0) {
            map_weights_backward<D>(d, net.read_in_down, D, read_in_TD, dx_TD, T);
            map_backward(w, net.read_in_down, D, D, dx_TD, y_TD, T);
            for (long i = 0; i < T * D; i++) dx_TD[i] = y_TD[i] * read_in_slope_TD[i];
        }
        map_weights_backward<D>(d, net.read_in, net.num_inputs, coordinates, dx_TD, T);
    }
    void read_out() {  // without a map, the first coordinates of the states
        if (net.read_out.weight >= 0) return map<C>(w, net.read_out, D, x_TD, outputs_TC, T);
        for (long t = 0; t < T; t++) std::copy_n(x_TD + t * D, C, outputs_TC + t * C);
    }
    void read_out_backward() {
        if (net.read_out.weight >= 0) {
            map_weights_backward<C>(d, net.read_out, D, x_TD, outputs_TC, T);
            return map_backward(w, net.read_out, C, D, outputs_TC, dx_TD, T);
        }
        std::fill_n(dx_TD, T * D, real(0));
        for (long t = 0; t < T; t++) std::copy_n(outputs_TC + t * C, C, dx_TD + t * D);
    }

    // Where one of the chunk's heads has its queries, keys and values, its table P and its outputs.
    struct Head {
        long queries, keys, values, table, outputs;
    };
    static Head place_of(long head) {
        const long b = head / H, h = head % H, queries = b * N * E + h * K;
        return {queries, queries + E - J - I, b * N * E + E - J + h * V, head * N * N, b * N * J + h * V};
    }
    // Queries of a head are taken together if there are few, or if all see all keys. Else each of ROWS goes with the keys
    // up to the last one that they see.
    bool goes_whole() const { return N <= ROWS || !net.hidden_NM; }
    void count_seen() {
        if (goes_whole()) return;
        num_seen.assign((N + ROWS - 1) / ROWS, 0);
        for (long i = 0; i < N * N; i++)
            if (net.hidden_NM[i] == 0) num_seen[i / N / ROWS] = std::max(num_seen[i / N / ROWS], i % N + 1);
        num_seen.back() = N;
    }
    // Calls a function with the queries of a head, those that see all keys first.
    template <class Function>
    INLINED inline void each_rows(Function function) const {
        if (goes_whole()) return function(Rows{0, N, N});
        for (long part = num_seen.size() - 1; part >= 0; part--)
            function(Rows{part * ROWS, std::min(ROWS, N - part * ROWS), num_seen[part]});
    }
    // The products of rows of a with rows of b, where queries see keys.
    template <long inner>
    INLINED inline void multiply_seen(Matrix a, const real* b, long width, real* table_NM) const {
        if (goes_whole()) return multiply(N, N, inner, a, transpose_of(b, width), table_NM, N, false);
        constexpr long across = TILE_VECTORS * LANES;
        for (long m = 0, part = 0; m < N; m += across) {
            while (num_seen[part] <= m) part++;
            const long n = part * ROWS;
            multiply(N - n, std::min(across, N - m), inner, {a.numbers + n * a.row, a.row, 1},
                     transpose_of(b + m * width, width), table_NM + n * N + m, N, false);
        }
    }
    // tokens: of the chunk; null if none can be absent.
    void attend(const KeptSublayer& kept, long head, const int64_t* tokens) {
        const Head at = place_of(head);
        const real* k_NK = kept.in_TE + at.keys;
        const int64_t* own = tokens ? tokens + head / H * N : nullptr;
        const real scale = net.score_scale;
        multiply_seen<K>(rows_of(kept.in_TE + at.queries, E), k_NK, E, kept.p_BHNM + at.table);
        each_rows([&](Rows rows) INLINED {
            const auto [first, R, M] = rows;
            real* p_RN = kept.p_BHNM + at.table + first * N;
            const real* hidden_RN = net.hidden_NM ? net.hidden_NM + first * N : nullptr;
            if (net.is_l2) without_halves(rows, k_NK, p_RN);
            for (long run = 0; run < rows.runs(); run++) {
                real* p = p_RN + run * N;
                for (long i = 0; i < rows.length(); i++) p[i] *= scale;
                if (!hidden_RN) continue;
                for (long i = 0; i < rows.length(); i++) p[i] += hidden_RN[run * N + i];
            }
            for (long m = 0; m < M && own; m++)  // no token sees an absent one, except that one itself
                for (long n = 0; n < R && own[m] < 0; n++)
                    if (first + n != m) p_RN[n * N + m] = -INFINITY;
            softmax(rows, p_RN);
            multiply(R, V, M, rows_of(dropped(kept, at.table, rows), N), rows_of(kept.in_TE + at.values, E),
                     kept.mixed + at.outputs + first * J, J, false);
        });
    }
    void attend_backward(const KeptSublayer& kept, long head) {
        const Head at = place_of(head);
        const real *q_NK = kept.in_TE + at.queries, *k_NK = kept.in_TE + at.keys, *dmixed_NV = dmixed + at.outputs;
        const real scale = net.score_scale;
        multiply_seen<V>(rows_of(dmixed_NV, J), kept.in_TE + at.values, E, slope_NM);
        each_rows([&](Rows rows) INLINED {
            const auto [first, R, M] = rows;
            real* slope_RN = slope_NM + first * N;
            apply_dropout(kept, at.table, rows, slope_RN);
            softmax_backward(rows, kept.p_BHNM + at.table + first * N, slope_RN);
            for (long run = 0; run < rows.runs(); run++)
                for (long i = 0; i < rows.length(); i++) slope_RN[run * N + i] *= scale;
            multiply(R, K, M, rows_of(slope_RN, N), rows_of(k_NK, E), din_TE + at.queries + first * E, E, false);
        });
        each_rows([&](Rows rows) INLINED {
            const auto [first, R, M] = rows;
            const real* slope_RN = slope_NM + first * N;
            const bool adds = first + R < N;
            multiply(M, K, R, transpose_of(slope_RN, N), rows_of(q_NK + first * E, E), din_TE + at.keys, E, SHARED || adds);
            if (net.is_l2) halves_backward(rows, k_NK, slope_RN, din_TE + at.keys);
            multiply(M, V, R, transpose_of(dropped(kept, at.table, rows), N), rows_of(dmixed_NV + first * J, J),
                     din_TE + at.values, E, adds);
        });
    }
    // Divides the outputs of all heads, (T, J), or their slopes, by the bound of their sequence.
    void contract(const KeptSublayer& kept, real* x_TJ, const int64_t* tokens) {
        for (long b = 0; b < B; b++) {
            long present = tokens ? 0 : N;
            for (long n = b * N; n < (b + 1) * N && tokens; n++) present += tokens[n] >= 0;
            const real inverse = net.inverses[std::max(present, 1L) - 1];
            const real factor = real(net.contraction) / ((4 * inverse + ROOT) * kept.bound.product);
            for (long i = b * N * J; i < (b + 1) * N * J; i++) x_TJ[i] *= factor;
        }
    }
    // Multiplies numbers of a head's table by the masks of dropout.
    void apply_dropout(const KeptSublayer& kept, long table, Rows rows, real* x_RN) const {
        const long place = kept.place_of_weights + start * H * N * N + table + rows.first * N;
        for (long run = 0; run < rows.runs(); run++) dropout.apply(x_RN + run * N, rows.length(), place + run * N);
    }
    // P of some queries of a head after dropout.
    const real* dropped(const KeptSublayer& kept, long table, Rows rows) {
        const real* p_RN = kept.p_BHNM + table + rows.first * N;
        if (dropout.scale == 0) return p_RN;
        for (long run = 0; run < rows.runs(); run++) std::copy_n(p_RN + run * N, rows.length(), dropped_NM + run * N);
        apply_dropout(kept, table, rows, dropped_NM);
        return dropped_NM;
    }

    void forward(long s, const int64_t* tokens) {
        const Sublayer& sub = net.sublayers[s];
        const KeptSublayer& k = kept[s];
        const real skip = sub.skip, branch = sub.branch, share = net.share;
        norm(w, sub.before, k.x_TD, k.read_TD, k.before, T);
        if (sub.is_mlp) {
            map<F>(w, sub.in, D, k.read_TD, k.in_TE, T);
            activate(net.is_relu, k.in_TE, k.mixed, k.slope_TF, T * F);
            map<D>(w, sub.out, F, k.mixed, y_TD, T);
        } else {
            map<E>(w, sub.in, D, k.read_TD, k.in_TE, T);
            for (long head = 0; head < B * H; head++) attend(k, head, tokens);
            for (long i = 0; i < T * J && share != 1; i++) k.mixed[i] *= share;
            if (net.contraction) contract(k, k.mixed, tokens);
            map<D>(w, sub.out, J, k.mixed, y_TD, T);
        }
        dropout.apply(y_TD, T * D, k.place_of_output + start * N * D);
        norm(w, sub.behind, y_TD, y_TD, k.behind, T);
        real* sum_TD = state_after(s);
        if (skip == 0)  // not even a nan is carried past the sub-layer
            for (long i = 0; i < T * D; i++) sum_TD[i] = branch * y_TD[i];
        else
            for (long i = 0; i < T * D; i++) sum_TD[i] = skip * k.x_TD[i] + branch * y_TD[i];
        norm(w, sub.after, sum_TD, sum_TD, k.after, T);
    }
    // Turns dx from the slope of the sub-layer's output into that of its input.
    void backward(long s, const int64_t* tokens) {
        const Sublayer& sub = net.sublayers[s];
        KeptSublayer& k = kept[s];
        const real skip = sub.skip, branch = sub.branch, share = net.share;
        norm_backward(w, d, sub.after, k.after, dx_TD, T);
        for (long i = 0; i < T * D; i++) y_TD[i] = branch * dx_TD[i];
        norm_backward(w, d, sub.behind, k.behind, y_TD, T);
        dropout.apply(y_TD, T * D, k.place_of_output + start * N * D);
        const long inner = sub.is_mlp ? F : J, wide = sub.is_mlp ? F : E;
        map_weights_backward<D>(d, sub.out, inner, k.mixed, y_TD, T);
        map_backward(w, sub.out, D, inner, y_TD, dmixed, T);
        if (sub.is_mlp) {
            for (long i = 0; i < T * F; i++) din_TE[i] = dmixed[i] * k.slope_TF[i];
            map_weights_backward<F>(d, sub.in, D, k.read_TD, din_TE, T);
        } else {
            if (net.contraction) {
                for (long i = 0; i < T * J; i++) k.slope_of_bound -= dmixed[i] * k.mixed[i];
                contract(k, dmixed, tokens);
            }
            for (long i = 0; i < T * J && share != 1; i++) dmixed[i] *= share;
            for (long head = 0; head < B * H; head++) attend_backward(k, head);
            map_weights_backward<E>(d, sub.in, D, k.read_TD, din_TE, T);
        }
        map_backward(w, sub.in, wide, D, din_TE, y_TD, T);
        norm_backward(w, d, sub.before, k.before, y_TD, T);
        for (long i = 0; i < T * D; i++) dx_TD[i] = skip * dx_TD[i] + y_TD[i];
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
