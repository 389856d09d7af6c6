// What the caller describes: a network, and a batch of sequences. fused_step.cpp includes this file; its structures are
// filled by fused_step.py, and every field has 8 bytes.

#include "parts.h"

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
    Affine read_in, read_in_down, read_out;  // weight -1: missing. read_in_down: of an MLP that reads in
    long position;         // learned; -1: none
    const real* sines_ND;  // fixed positions; null: none
    Norm embedding, last;
    double score_scale, share;  // share: what P v is multiplied by
    long is_l2;
    double contraction;    // of contractive L2; 0: none
    const real* inverses;  // inverse_phi of 1, 2, ... keys
    const real* hidden_NM;  // 0, or -infinity for a key that the query does not see; null: it sees all
    long is_relu;
};
struct Batch {  // inputs and targets of all seeds, (S, B, N, ...)
    long num_seeds, num_sequences, num_tokens, chunk;
    long num_threads, num_parts;  // num_parts: of a seed's sequences, each with its own gradients
    const void *inputs, *targets;  // tokens or coordinates; classes or numbers
    const long* streams;           // factor and shift of each seed's stream of dropout's bits; null: no dropout
    long last_kept;                // the largest bits of an entry that dropout keeps
    double kept_scale;             // what dropout multiplies these by
};
