// Matrix products on one core: c = a b, or c += a b.
//
// A tile of c stays in the vector registers while it is summed up. The part of b that a column of tiles needs is first
// copied into a panel, whose rows lie one after the other, so that b may as well be a transpose, as may a. Small
// products reach the rate of large ones, because sizes and copies fit the first cache.
//
// Shapes: M rows and N columns of c, K inner; all stored in arrays of `real`, which the including file names.

#include <algorithm>
#include <cstring>

// Always inlined, so that the compiler knows the sizes that a caller knows.
#define INLINE static inline __attribute__((always_inline))

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

// A matrix whose entry (i, j) is numbers[i row + j column].
struct Matrix {
    const real* numbers;
    long row, column;
};
static inline Matrix rows_of(const real* numbers, long width) { return {numbers, width, 1}; }
static inline Matrix transpose_of(const real* numbers, long width) { return {numbers, 1, width}; }

// The first M <= TILE_ROWS rows and N columns of c, whose rows lie `width` apart.
template <long vectors>
INLINE void tile(long M, long N, long K, Matrix a, const real* panel, real* c, long width, bool adds) {
    Vector sums[TILE_ROWS][vectors] = {};
    const real* rows[TILE_ROWS];
    for (long i = 0; i < TILE_ROWS; i++) rows[i] = a.numbers + std::min(i, M - 1) * a.row;
    for (long k = 0; k < K; k++) {
        const Vector* b = reinterpret_cast<const Vector*>(panel + k * vectors * LANES);
#pragma GCC unroll 8
        for (long i = 0; i < TILE_ROWS; i++) {
            const real factor = rows[i][k * a.column];
#pragma GCC unroll 3
            for (long v = 0; v < vectors; v++) sums[i][v] += factor * b[v];
        }
    }
    for (long i = 0; i < M; i++) {
        real row[vectors * LANES];
        std::memcpy(row, sums[i], sizeof row);
        for (long j = 0; j < N; j++) c[i * width + j] = adds ? c[i * width + j] + row[j] : row[j];
    }
}

// N <= vectors LANES columns of c.
template <long vectors>
INLINE void columns(long M, long N, long K, Matrix a, Matrix b, real* c, long width, bool adds) {
    constexpr long across = vectors * LANES;
    alignas(VECTOR) real panel[PANEL_ROWS * across];
    for (long first = 0; first < K; first += PANEL_ROWS) {
        const long depth = std::min(PANEL_ROWS, K - first);
        const real* part = b.numbers + first * b.row;
        if (N < across) std::fill_n(panel, depth * across, real(0));
        if (b.column == 1)
            for (long k = 0; k < depth; k++) std::copy_n(part + k * b.row, N, panel + k * across);
        else
            for (long j = 0; j < N; j++)
                for (long k = 0; k < depth; k++) panel[k * across + j] = part[k * b.row + j * b.column];
        for (long i = 0; i < M; i += TILE_ROWS)
            tile<vectors>(std::min(TILE_ROWS, M - i), N, depth, {a.numbers + i * a.row + first * a.column, a.row, a.column},
                          panel, c + i * width, width, adds || first > 0);
    }
}

// width: how far apart the rows of c lie.
INLINE void multiply(long M, long N, long K, Matrix a, Matrix b, real* c, long width, bool adds) {
    const long vectors = (N + LANES - 1) / LANES, tiles = (vectors + TILE_VECTORS - 1) / TILE_VECTORS;
    const long across = (vectors + tiles - 1) / tiles;  // vectors of a tile, so that no tile is much narrower than others
    for (long j = 0; j < N; j += across * LANES) {
        const long n = std::min(across * LANES, N - j);
        const Matrix part{b.numbers + j * b.column, b.row, b.column};
        if (across == 1)
            columns<1>(M, n, K, a, part, c + j, width, adds);
        else if (across == 2)
            columns<2>(M, n, K, a, part, c + j, width, adds);
        else
            columns<TILE_VECTORS>(M, n, K, a, part, c + j, width, adds);
    }
}
