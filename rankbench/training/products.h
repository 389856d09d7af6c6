// Matrix products on one core: c = a b, or c += a b.
//
// A tile of c stays in the vector registers while it is summed up. The part of b that a column of tiles needs is first
// copied into a panel, whose rows lie one after the other, so that b may as well be a transpose, as may a. Small
// products reach the rate of large ones, because sizes and copies fit the first cache.
//
// Shapes: M rows and N columns of c, K inner; all stored in arrays of `real`, which the including file names.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

// Always inlined, so that the compiler knows the sizes that a caller knows.
#define INLINED __attribute__((always_inline))
#define INLINE static inline INLINED

// Bytes of a vector register, and the rows and vectors of a tile, which leave a few registers to a and b.
#if defined(__AVX512F__)
constexpr long VECTOR = 64, TILE_ROWS = 8, TILE_VECTORS = 3;
#elif defined(__AVX__)
constexpr long VECTOR = 32, TILE_ROWS = 6, TILE_VECTORS = 2;
#else
constexpr long VECTOR = 16, TILE_ROWS = 6, TILE_VECTORS = 2;
#endif
constexpr long LANES = VECTOR / sizeof(real);
constexpr long PANEL_ROWS = 256;  // with the columns of a tile 48 KiB at most

typedef real Vector __attribute__((vector_size(VECTOR), may_alias));
typedef real Anywhere __attribute__((vector_size(VECTOR), may_alias, aligned(sizeof(real))));

// A matrix whose entry (i, j) is numbers[i row + j column].
struct Matrix {
    const real* numbers;
    long row, column;
};
static inline Matrix rows_of(const real* numbers, long width) { return {numbers, width, 1}; }
static inline Matrix transpose_of(const real* numbers, long width) { return {numbers, 1, width}; }

// Numbers of x and of y in turn, from a place on.
template <long from, long... i>
INLINE Vector in_turn(const Vector& x, const Vector& y, std::integer_sequence<long, i...>) {
#ifdef __clang__
    return __builtin_shufflevector(x, y, (from + i / 2 + i % 2 * LANES)...);
#else
    using Place = std::conditional_t<sizeof(real) == 4, int32_t, int64_t>;
    typedef Place Places __attribute__((vector_size(VECTOR)));
    return __builtin_shuffle(x, y, Places{(from + i / 2 + i % 2 * LANES)...});
#endif
}
// Writes the transpose of a block, of `rows` <= LANES rows that lie `stride` apart and of `numbers` <= LANES columns, as rows
// that lie `across` apart. Each round puts the rows of two halves between one another, number by number.
INLINE void transpose_block(const real* block, long stride, long rows, long numbers, real* to, long across) {
    Vector x[LANES] = {}, y[LANES];
    for (long i = 0; i < rows; i++)
        if (numbers == LANES)
            std::memcpy(x + i, block + i * stride, VECTOR);
        else
            for (long j = 0; j < numbers; j++) x[i][j] = block[i * stride + j];
    for (long round = 1; round < LANES; round *= 2) {
        for (long i = 0; i < LANES / 2; i++) {
            y[2 * i] = in_turn<0>(x[i], x[i + LANES / 2], std::make_integer_sequence<long, LANES>());
            y[2 * i + 1] = in_turn<LANES / 2>(x[i], x[i + LANES / 2], std::make_integer_sequence<long, LANES>());
        }
        std::copy_n(y, LANES, x);
    }
    for (long i = 0; i < numbers; i++) std::memcpy(to + i * across, x + i, VECTOR);
}

// The first M <= TILE_ROWS rows and N columns of c, whose rows lie `width` apart. The panel's first row is what all of
// them begin with.
template <long vectors>
INLINE void tile(long M, long N, long K, Matrix a, const real* panel, real* c, long width, bool adds) {
    const Vector* b = reinterpret_cast<const Vector*>(panel);
    Vector sums[TILE_ROWS][vectors];
#pragma GCC unroll 8
    for (long i = 0; i < TILE_ROWS; i++)
#pragma GCC unroll 3
        for (long v = 0; v < vectors; v++) sums[i][v] = b[v];
    const real* rows[TILE_ROWS];
    for (long i = 0; i < TILE_ROWS; i++) rows[i] = a.numbers + std::min(i, M - 1) * a.row;
    for (long k = 0; k < K; k++) {
        b += vectors;
#pragma GCC unroll 8
        for (long i = 0; i < TILE_ROWS; i++) {
            const real factor = rows[i][k * a.column];
#pragma GCC unroll 3
            for (long v = 0; v < vectors; v++) sums[i][v] += factor * b[v];
        }
    }
    for (long i = 0; i < M; i++, c += width)
        for (long v = 0; v < vectors; v++) {
            Anywhere& part = reinterpret_cast<Anywhere*>(c)[v];
            if ((v + 1) * LANES <= N)
                part = adds ? part + sums[i][v] : sums[i][v];
            else
                for (long j = 0; j < N - v * LANES; j++) part[j] = adds ? part[j] + sums[i][v][j] : sums[i][v][j];
        }
}

// N <= vectors LANES columns of c. start: of all its rows; null: 0.
template <long vectors>
INLINE void columns(long M, long N, long K, Matrix a, Matrix b, const real* start, real* c, long width, bool adds) {
    constexpr long across = vectors * LANES;
    alignas(VECTOR) real panel[(1 + PANEL_ROWS) * across];
    for (long first = 0; first < K; first += PANEL_ROWS) {
        const long depth = std::min(PANEL_ROWS, K - first);
        const real* part = b.numbers + first * b.row;
        std::fill_n(panel, across, real(0));
        if (start && first == 0) std::copy_n(start, N, panel);
        real* row = panel + across;
        if (b.column == 1) {
            for (long k = 0; k < depth; k++, row += across) {
                std::copy_n(part + k * b.row, N, row);
                std::fill(row + N, row + across, real(0));
            }
        } else {
            for (long k = 0; k < depth; k += LANES)
                for (long j = 0; j < across; j += LANES)
                    transpose_block(part + j * b.column + k, b.column, std::clamp(N - j, 0L, LANES),
                                    std::min(LANES, depth - k), row + k * across + j, across);
        }
        for (long i = 0; i < M; i += TILE_ROWS)
            tile<vectors>(std::min(TILE_ROWS, M - i), N, depth, {a.numbers + i * a.row + first * a.column, a.row, a.column},
                          panel, c + i * width, width, adds || first > 0);
    }
}

// width: how far apart the rows of c lie. start: what each of them begins with; null: 0.
INLINE void multiply(long M, long N, long K, Matrix a, Matrix b, real* c, long width, bool adds, const real* start = nullptr) {
    const long vectors = (N + LANES - 1) / LANES, tiles = (vectors + TILE_VECTORS - 1) / TILE_VECTORS;
    const long across = (vectors + tiles - 1) / tiles;  // vectors of a tile, so that no tile is much narrower than others
    for (long j = 0; j < N; j += across * LANES) {
        const long n = std::min(across * LANES, N - j);
        const Matrix part{b.numbers + j * b.column, b.row, b.column};
        if (across == 1)
            columns<1>(M, n, K, a, part, start ? start + j : nullptr, c + j, width, adds);
        else if (across == 2)
            columns<2>(M, n, K, a, part, start ? start + j : nullptr, c + j, width, adds);
        else
            columns<TILE_VECTORS>(M, n, K, a, part, start ? start + j : nullptr, c + j, width, adds);
    }
}
