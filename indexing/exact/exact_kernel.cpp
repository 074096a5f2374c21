// Exact top-k inner products: products in low precision, compared with running thresholds while they are still in the
// nearest cache, and the survivors scored again in float64. Called through the plain C interface at the end.
//
// What makes the result exact: every product s of rounded vectors comes with a bound E on its distance from the true score,
//     E = a |p| + b |p - p'| + tiny,    a = |q - q'| + (sums + 32) 2^-23 |q|,    b = |q'|,
// where q', p' are the rounded copies (Cauchy-Schwarz; the second part of a covers the additions in float32, of which there
// are none or dim, and the rounding of scores and thresholds). If k passages have true scores of at least T, a passage with
// s + E < T is not among the top k. T only rises, so passages may come in any order and be divided among threads in any way:
// the result stays the same. As only E depends on the products, it is the same on every CPU.
//
// The rounded copies have 16 bits per value: bfloat16 where the CPU multiplies it, else integers. The integers of a vector
// have one scale, which makes their norm at most 46,340. So no sum of products exceeds 32 bits (Cauchy-Schwarz again).
//
// Shapes: queries and passages are handled in tiles of 16 and groups of 32, dimensions in steps of 32, all zero-padded.
// A block is 32 passages x 32 queries: four tiles.

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

namespace {

constexpr int TILE = 16;            // rows of an AMX tile
constexpr int GROUP = 2 * TILE;     // passages or queries of a block
constexpr int STEP = 32;            // values in a tile's row
constexpr int TILE_VALUES = TILE * STEP;
constexpr int64_t PANEL_BYTES = 1 << 20;  // half of a 2 MiB L2: a panel of passages stays there for many queries
constexpr int PANELS = 8;                 // converted between two barriers
constexpr int WARM_ROWS_PER_K = 24;       // size of the sample for the first thresholds; more costs what it saves
constexpr float LARGEST_SQUARE = 1e30f;   // of a norm; mirrored by arrays.py's MAX_NORM
constexpr float TINY = 1e-30f;            // covers products that underflow

template <class T>
struct Free {
    void operator()(T* p) const { std::free(p); }
};
template <class T>
using Buffer = std::unique_ptr<T[], Free<T>>;

// Pages are touched by whoever uses them first, so a large buffer that is used in part costs that part.
template <class T>
Buffer<T> allocate(int64_t count) {
    const size_t bytes = (std::max<int64_t>(count, 1) * sizeof(T) + 63) / 64 * 64;
    void* p = std::aligned_alloc(64, bytes);
    if (p == nullptr) throw std::bad_alloc();
    return Buffer<T>(static_cast<T*>(p));
}

// --------------------------------------------------------------------------------------------------------- registers

// WIDTH: numbers of a register.
#if defined(__AVX512BW__)
#define WIDTH 16
#elif defined(__AVX2__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
constexpr int PARTS = TILE / WIDTH;  // registers of a tile's row

typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));
typedef double Doubles __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));

template <class Register, class T>
inline Register load(const T* from) {
    Register found;
    std::memcpy(&found, from, sizeof found);
    return found;
}

inline Floats load(const float* from) { return load<Floats>(from); }

template <class Register, class T>
inline void store(T* to, Register values) {
    std::memcpy(to, &values, sizeof values);
}

template <class To, class From>
inline To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    return load<To>(&from);
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
inline Floats smaller(Floats a, Floats b) { return a < b ? a : b; }

// Reduces the lanes with `join`: pairs of lanes at a distance of half the lanes, then of half of that, down to 1.
template <class Register, class Join>
inline auto joined(Register values, Join join) {
    constexpr int lanes = sizeof values / sizeof values[0];
    decltype(values < values) lane;
    for (int i = 0; i < lanes; i++) lane[i] = i;
    for (int step = lanes / 2; step > 0; step /= 2) values = join(values, __builtin_shuffle(values, lane ^ step));
    return values[0];
}

constexpr auto plus = [](auto a, auto b) { return a + b; };

// A bit per lane: whether the value is at least the cut.
inline uint32_t reaches(Floats values, Floats cut) {
#if WIDTH == 16
    return _mm512_cmp_ps_mask((__m512)values, (__m512)cut, _CMP_GE_OQ);
#elif WIDTH == 8
    return _mm256_movemask_ps((__m256)(values >= cut));
#elif defined(__SSE2__)
    return _mm_movemask_ps((__m128)(values >= cut));
#elif defined(__aarch64__)
    return vaddvq_u32((uint32x4_t)((Words)(values >= cut) & Words{1, 2, 4, 8}));
#else
    const Ints reached = values >= cut;
    uint32_t bits = 0;
    for (int i = 0; i < WIDTH; i++) bits |= (reached[i] & 1u) << i;
    return bits;
#endif
}

inline Floats widened(const float* from) { return load(from); }

// float16 as float32.
inline Floats widened(const uint16_t* from) {
#if defined(__F16C__) && WIDTH == 16
    return (Floats)_mm512_cvtph_ps(load<__m256i>(from));
#elif defined(__F16C__) && WIDTH == 8
    return (Floats)_mm256_cvtph_ps(load<__m128i>(from));
#elif defined(__aarch64__)
    return (Floats)vcvt_f32_f16(load<float16x4_t>(from));
#else
    const Words bits = __builtin_convertvector(load<Halves>(from), Words), magnitude = (bits & 0x7fff) << 13;
    const Floats finite = same_bits<Floats>(magnitude) * 0x1p112f;  // the exponent has another bias
    const Words other = magnitude | 0x7f800000;                     // infinite or NaN
    return same_bits<Floats>((magnitude >= 0x7c00u << 13 ? other : same_bits<Words>(finite)) | (bits & 0x8000) << 16);
#endif
}

// ------------------------------------------------------------------------------------------------------- rounded copies

// BFLOAT16: the CPU multiplies bfloat16 and sums in float32.
#if defined(__AVX512BF16__) && WIDTH == 16 || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define BFLOAT16 1
#endif

using Value = uint16_t;  // a rounded value, in its bits

#ifdef BFLOAT16

using Sums = Floats;
constexpr bool EXACT_SUMS = false;

inline Halves rounded(Floats values) {
#ifdef __aarch64__
    return (Halves)vcvt_bf16_f32((float32x4_t)values);
#else
    return (Halves)_mm512_cvtneps_pbh((__m512)values);
#endif
}

// Adds to each lane of `sums` the products of its two values of `left` and `right`.
inline Sums dot(Sums sums, Ints left, Ints right) {
#ifdef __aarch64__
    return (Sums)vbfdotq_f32((float32x4_t)sums, (bfloat16x8_t)left, (bfloat16x8_t)right);
#else
    return (Sums)_mm512_dpbf16_ps((__m512)sums, (__m512bh)left, (__m512bh)right);
#endif
}

#else

using Sums = Ints;
constexpr bool EXACT_SUMS = true;
constexpr float ROUNDS = 12582912.0f;  // 3 * 2^22: adding it rounds a number to an integer

inline Sums dot(Sums sums, Ints left, Ints right) {
#if WIDTH == 16 && defined(__AVX512VNNI__)
    return (Ints)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)left, (__m512i)right);
#elif WIDTH == 16
    return sums + (Ints)_mm512_madd_epi16((__m512i)left, (__m512i)right);
#elif WIDTH == 8 && defined(__AVXVNNI__)
    return (Ints)_mm256_dpwssd_avx_epi32((__m256i)sums, (__m256i)left, (__m256i)right);
#elif WIDTH == 8
    return sums + (Ints)_mm256_madd_epi16((__m256i)left, (__m256i)right);
#elif defined(__SSE2__)
    return sums + (Ints)_mm_madd_epi16((__m128i)left, (__m128i)right);
#elif defined(__aarch64__)
    const int32x4_t low = vmull_s16(vget_low_s16((int16x8_t)left), vget_low_s16((int16x8_t)right));
    return sums + (Ints)vpaddq_s32(low, vmull_high_s16((int16x8_t)left, (int16x8_t)right));
#else
    return sums + (left << 16 >> 16) * (right << 16 >> 16) + (left >> 16) * (right >> 16);
#endif
}

#endif

// The factor that makes integers of a vector whose largest magnitude is `most`. A norm of 46,340 is not exceeded: the
// rounding adds up to sqrt(dim) / 2, and the norm, a sum in float32, may be 0.1% too small.
template <class Float>
inline Float factor_of(Float norm, Float most, int64_t dim) {
    const Float largest = Float(46290) - Float(0.5) * std::sqrt(Float(dim));
    return norm > Float(1e-15) ? std::min(largest / norm, Float(32766) / most) : 0;
}

// ---------------------------------------------------------------------------------------------------------- passages

struct Part {
    const char* vectors;
    bool half;  // float16, else float32
    int64_t dim;
    int64_t first_row;
    const char* row(int64_t i) const { return vectors + i * dim * (half ? 2 : 4); }
    int64_t row_bytes() const { return dim * (half ? 2 : 4); }
};

template <class T>
[[gnu::noinline, gnu::cold]] Floats load_last(const T* row, int64_t dim, int64_t i) {
    T rest[WIDTH] = {};
    for (int64_t j = i; j < dim; j++) rest[j - i] = row[j];
    return widened(rest);
}

// Values [i, i + WIDTH) of a row of float16 or float32 as float32, zeros beyond dim.
template <class T>
inline Floats load_values(const T* row, int64_t dim, int64_t i) {
    return dim - i >= WIDTH ? widened(row + i) : load_last(row, dim, i);
}

// Calls body with a row of a part in its type.
template <class Body>
inline auto with_row(const Part& part, int64_t i, const Body& body) {
    const char* row = part.row(i);
    return part.half ? body(reinterpret_cast<const uint16_t*>(row)) : body(reinterpret_cast<const float*>(row));
}

// Upper bounds over the passages of a tile: of |p| and of |p - p'|.
struct Norms {
    float vector = 0, rounding = 0;
    void include(const Norms& other) {
        vector = std::max(vector, other.vector);
        rounding = std::max(rounding, other.rounding);
    }
};

// Rounded passages, as [group][step][tile][passage][32]: what a block reads is one stretch of memory.
struct Panel {
    Buffer<Value> values;
    std::vector<float> scales;  // of integers
    std::vector<int32_t> rows;  // of the part, padded with -1
    std::vector<Norms> norms;   // per tile
    int64_t count = 0;          // passages, without padding

    void reserve(int64_t num_rows, int64_t steps) {
        values = allocate<Value>(num_rows * steps * STEP);
        scales.resize(num_rows);
        rows.resize(num_rows);
        norms.resize(num_rows / TILE);
    }

    // Fills the panel with `rows`; returns the first row that has no finite norm of at most 1e15, or -1.
    int64_t convert(const Part& part, const int32_t* first, int64_t num_rows, int64_t steps) {
        count = num_rows;
        const int64_t padded = (num_rows + GROUP - 1) / GROUP * GROUP;
        std::copy(first, first + num_rows, rows.begin());
        std::fill(rows.begin() + num_rows, rows.begin() + padded, -1);
        for (int64_t t = 0; t < padded / TILE; t++) norms[t] = Norms();
        for (int64_t i = 0; i < padded; i++) {
            Value* out = values.get() + (i / GROUP * steps * 2 + i / TILE % 2) * TILE_VALUES + i % TILE * STEP;
            if (rows[i] < 0) {
                for (int64_t s = 0; s < steps; s++) std::memset(out + s * 2 * TILE_VALUES, 0, STEP * sizeof(Value));
                continue;
            }
            Norms norm;
            if (!with_row(part, rows[i], [&](const auto* row) { return copy(row, part.dim, steps, out, scales[i], norm); }))
                return rows[i];
            norms[i / TILE].include(norm);
        }
        return -1;
    }

    // Rounds a row to `out`, for which integers have a scale; returns whether its norm is finite and at most 1e15.
    template <class T>
    static bool copy(const T* row, int64_t dim, int64_t steps, Value* out, float& scale, Norms& norm) {
        Floats square[2] = {}, error[2] = {};  // two sums each, so that one addition does not wait for the other
#ifdef BFLOAT16
        for (int64_t s = 0; s < steps; s++, out += 2 * TILE_VALUES)
#pragma GCC unroll 8
            for (int j = 0; j < STEP; j += WIDTH) {
                const Floats value = load_values(row, dim, s * STEP + j);
                const Halves copy = rounded(value);
                store(out + j, copy);
                const Floats off = value - same_bits<Floats>(__builtin_convertvector(copy, Words) << 16);
                square[j / WIDTH % 2] += value * value;
                error[j / WIDTH % 2] += off * off;
            }
        const float sum = joined(square[0] + square[1], plus);
        if (!(sum <= LARGEST_SQUARE)) return false;
#else
        Floats most = {};
        for (int64_t s = 0; s < steps; s++)
#pragma GCC unroll 8
            for (int j = 0; j < STEP; j += WIDTH) {
                const Floats value = load_values(row, dim, s * STEP + j);
                square[j / WIDTH % 2] += value * value;
                most = larger(larger(value, -value), most);
            }
        const float sum = joined(square[0] + square[1], plus);
        if (!(sum <= LARGEST_SQUARE)) return false;
        const float by = factor_of(std::sqrt(sum), joined(most, larger), dim);
        scale = by > 0 ? 1 / by : 0;
        for (int64_t s = 0; s < steps; s++, out += 2 * TILE_VALUES)
#pragma GCC unroll 8
            for (int j = 0; j < STEP; j += WIDTH) {
                const Floats value = load_values(row, dim, s * STEP + j), copy = (value * by + ROUNDS) - ROUNDS;
                store(out + j, __builtin_convertvector(__builtin_convertvector(copy, Ints), Halves));
                const Floats off = value - copy * scale;
                error[j / WIDTH % 2] += off * off;
            }
#endif
        // Tiny norms may underflow when squared; TINY in the bound is more than they can matter then.
        norm = {std::sqrt(sum) + 1e-18f, std::sqrt(joined(error[0] + error[1], plus)) + 1e-18f};
        return true;
    }
};

// How many passages a panel holds.
inline int64_t panel_rows_of(int64_t steps) {
    return std::clamp<int64_t>(PANEL_BYTES / (steps * STEP * 2) / GROUP * GROUP, 2 * GROUP, 4096);
}

// The rows of a part that are not deleted; `deleted` ascends.
inline std::vector<int32_t> live_rows(int64_t num_rows, const int64_t* deleted, int64_t num_deleted) {
    std::vector<int32_t> live;
    live.reserve(num_rows);
    for (int64_t i = 0, d = 0; i < num_rows; i++) {
        if (d < num_deleted && deleted[d] == i) {
            while (d < num_deleted && deleted[d] == i) d++;
        } else {
            live.push_back(static_cast<int32_t>(i));
        }
    }
    return live;
}

// A part's passages in panels, for searches that come again and again.
struct Converted {
    const Part part;
    const std::vector<int32_t> live;
    std::vector<Panel> panels;
    Norms norms;
    int64_t bad = -1;  // the first row that has no finite norm of at most 1e15

    Converted(const Part& of, int64_t num_rows, const int64_t* deleted, int64_t num_deleted)
        : part(of), live(live_rows(num_rows, deleted, num_deleted)) {
        const int64_t steps = (part.dim + STEP - 1) / STEP, most = panel_rows_of(steps);
        for (int64_t start = 0; start < static_cast<int64_t>(live.size()) && bad < 0; start += most) {
            const int64_t rows = std::min(most, static_cast<int64_t>(live.size()) - start);
            Panel& panel = panels.emplace_back();
            panel.reserve((rows + GROUP - 1) / GROUP * GROUP, steps);
            bad = panel.convert(part, live.data() + start, rows, steps);
            for (const Norms& tile : panel.norms) norms.include(tile);
        }
    }
};

// ------------------------------------------------------------------------------------------------------ the product

// Products of 32 passages (rows) and 32 queries (columns), as four tiles.
struct alignas(64) Block {
    float tile[2][2][TILE][TILE];  // [passage tile][query tile][passage][query]
};

#ifdef __AMX_BF16__
struct AmxTiles {
    AmxTiles() {
        alignas(64) uint8_t config[64] = {};
        config[0] = 1;  // palette
        for (int t = 0; t < 8; t++) {
            config[16 + 2 * t] = 64;  // bytes per row
            config[48 + t] = TILE;
        }
        asm volatile("" ::: "memory");  // GCC's intrinsic names only 8 bytes as read, and drops the writes of the others
        _tile_loadconfig(config);
    }
    ~AmxTiles() { _tile_release(); }
};

inline void multiply_amx(const Value* passages, const Value* queries, int64_t steps, Block& out) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t s = 0; s < steps; s++) {
        _tile_loadd(4, passages, 64);
        _tile_loadd(6, queries, 64);
        _tile_loadd(7, queries + TILE_VALUES, 64);
        _tile_loadd(5, passages + TILE_VALUES, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        passages += 2 * TILE_VALUES;
        queries += 2 * TILE_VALUES;
    }
    _tile_stored(0, out.tile[0][0], 64);
    _tile_stored(1, out.tile[0][1], 64);
    _tile_stored(2, out.tile[1][0], 64);
    _tile_stored(3, out.tile[1][1], 64);
}
#endif

// Sums that are computed together: PASSAGES x COLUMNS registers, which the CPU has.
constexpr int PASSAGES = WIDTH == 16 ? 8 : 4;
constexpr int COLUMNS = WIDTH == 4 ? 4 : 2;

// The same without matrix units. Integers are multiplied by the scales of their passages and queries.
inline void multiply_registers(const Value* passages, const float* passage_scales, const Value* queries,
                               const float* query_scales, int64_t steps, Block& out) {
    // Of a column of sums: its tile, and its first query of that.
    const auto tile_of = [](int column) { return column / PARTS; };
    const auto query_of = [](int column) { return column % PARTS * WIDTH; };
    for (int column = 0; column < 2 * PARTS; column += COLUMNS)
        for (int first = 0; first < GROUP; first += PASSAGES) {
            const Value* p = passages + first / TILE * TILE_VALUES + first % TILE * STEP;
            const Value* q = queries;
            Sums sums[PASSAGES][COLUMNS] = {};
            for (int64_t s = 0; s < steps; s++, p += 2 * TILE_VALUES, q += 2 * TILE_VALUES)
                for (int pair = 0; pair < STEP / 2; pair++) {
                    Ints right[COLUMNS];
#pragma GCC unroll 4
                    for (int c = 0; c < COLUMNS; c++)
                        right[c] = load<Ints>(q + tile_of(column + c) * TILE_VALUES + pair * STEP + 2 * query_of(column + c));
#pragma GCC unroll 8
                    for (int i = 0; i < PASSAGES; i++) {
                        const Ints left = Ints{} + load<int32_t>(p + i * STEP + 2 * pair);
#pragma GCC unroll 4
                        for (int c = 0; c < COLUMNS; c++) sums[i][c] = dot(sums[i][c], left, right[c]);
                    }
                }
#pragma GCC unroll 8
            for (int i = 0; i < PASSAGES; i++)
#pragma GCC unroll 4
                for (int c = 0; c < COLUMNS; c++) {
                    const int tile = tile_of(column + c), query = query_of(column + c);
                    Floats products = __builtin_convertvector(sums[i][c], Floats);
                    if (EXACT_SUMS) products = products * passage_scales[first + i] * load(query_scales + tile * TILE + query);
                    store(&out.tile[first / TILE][tile][first % TILE + i][query], products);
                }
        }
}

// ------------------------------------------------------------------------------------------------------ exact scores

// The lower or the upper half of the values as float64. (GCC 12 converts half as many as the CPU does at once.)
template <int... lane>
inline Doubles widened(Floats values, bool upper, std::integer_sequence<int, lane...>) {
#if WIDTH == 16
    return (Doubles)_mm512_cvtps_pd(upper ? _mm512_extractf32x8_ps((__m512)values, 1) : _mm512_castps512_ps256((__m512)values));
#elif WIDTH == 8
    return (Doubles)_mm256_cvtps_pd(upper ? _mm256_extractf128_ps((__m256)values, 1) : _mm256_castps256_ps128((__m256)values));
#else
    return __builtin_convertvector(upper ? __builtin_shufflevector(values, values, (lane + WIDTH / 2)...)
                                         : __builtin_shufflevector(values, values, lane...), Doubles);
#endif
}

// The true inner product, rounded once: products of float32 and float16 are exact in float64, and the order of the 32
// sums is the same for all registers.
template <class T>
inline float exact_score(const T* row, int64_t dim, const double* query) {
    constexpr int HALF = WIDTH / 2;
    Doubles sums[STEP / HALF] = {};
    for (int64_t i = 0; i < dim; i += STEP)
#pragma GCC unroll 8
        for (int j = 0; j < STEP; j += WIDTH) {
            const Floats values = load_values(row, dim, i + j);
#pragma GCC unroll 2
            for (int upper = 0; upper < 2; upper++)
                sums[j / HALF + upper] += widened(values, upper, std::make_integer_sequence<int, HALF>()) *
                                          load<Doubles>(query + i + j + upper * HALF);
        }
    // Four times 8 sums become 8.
    constexpr int EIGHTH = 8 / HALF;
    Doubles eight[EIGHTH];
    for (int i = 0; i < EIGHTH; i++)
        eight[i] = (sums[i] + sums[EIGHTH + i]) + (sums[2 * EIGHTH + i] + sums[3 * EIGHTH + i]);
    for (int half = EIGHTH / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) eight[i] += eight[i + half];
    return static_cast<float>(joined(eight[0], plus)) + 0.0f;  // + 0: no negative zero, which would sort apart
}

inline void prefetch(const Part& part, int64_t row) {
    const char* p = part.row(row);
    for (int64_t i = 0; i < part.row_bytes(); i += 64) __builtin_prefetch(p + i);
}

void widen(const float* query, int64_t dim, int64_t padded_dim, double* out) {
    std::fill(std::copy(query, query + dim, out), out + padded_dim, 0.0);
}

void widen(const Part& part, int64_t row, int64_t padded_dim, double* out) {
    float values[WIDTH];
    for (int64_t i = 0; i < padded_dim; i += WIDTH) {
        store(values, with_row(part, row, [&](const auto* from) { return load_values(from, part.dim, i); }));
        std::copy(values, values + WIDTH, out + i);
    }
}

// Scores of candidates by row (of the part); -1 gives -inf.
void score_rows(const Part& part, const double* query, const int64_t* rows, int64_t count, float* scores) {
    constexpr int64_t AHEAD = 4;
    for (int64_t i = 0; i < count; i++) {
        if (i + AHEAD < count && rows[i + AHEAD] >= 0) prefetch(part, rows[i + AHEAD]);
        scores[i] = rows[i] < 0 ? -std::numeric_limits<float>::infinity()
                                : with_row(part, rows[i], [&](const auto* row) { return exact_score(row, part.dim, query); });
    }
}

// Descending scores as ascending unsigned integers.
inline uint32_t descending(float score) {
    uint32_t bits;
    std::memcpy(&bits, &score, sizeof bits);
    return bits & 0x80000000u ? bits : ~bits & 0x7fffffffu;
}

template <class Body>
void in_threads(int threads, const Body& body) {
    std::vector<std::thread> others;
    for (int t = 1; t < threads; t++) others.emplace_back([&body, t] { body(t); });
    body(0);
    for (auto& thread : others) thread.join();
}

// ---------------------------------------------------------------------------------------------------------- the search

// What a thread works with; nothing in it outlives a call.
struct Scratch {
    Buffer<double> query;
    std::vector<float> values, scores;
    std::vector<int64_t> rows;
    std::vector<uint64_t> order;
    std::vector<std::pair<float, int64_t>> best;
};

class Search {
public:
    Search(const float* queries, int64_t num_queries, int64_t dim, int64_t k, int threads, bool amx)
        : num_queries_(num_queries), dim_(dim), steps_((dim + STEP - 1) / STEP), k_(k), threads_(threads), amx_(amx),
          groups_((num_queries + GROUP - 1) / GROUP), capacity_((2 * k + 256 + 15) / 16 * 16),
          queries_(queries, queries + num_queries * dim) {
        const int64_t padded = groups_ * GROUP;
        packed_ = allocate<Value>(groups_ * steps_ * 2 * TILE_VALUES);
        std::memset(packed_.get(), 0, groups_ * steps_ * 2 * TILE_VALUES * sizeof(Value));
        per_norm_ = allocate<float>(padded);
        per_rounding_ = allocate<float>(padded);
        threshold_ = allocate<float>(padded);
        integer_scale_ = allocate<float>(padded);
        scale_.resize(num_queries);
        // Padding never passes a threshold of +inf.
        std::fill_n(threshold_.get(), padded, std::numeric_limits<float>::infinity());
        std::fill_n(threshold_.get(), num_queries, -std::numeric_limits<float>::infinity());
        std::fill_n(per_norm_.get(), padded, 0.0f);
        std::fill_n(per_rounding_.get(), padded, 0.0f);
        std::fill_n(integer_scale_.get(), padded, 0.0f);
        for (int64_t q = 0; q < num_queries; q++) pack(q);
        lower_ = allocate<float>(padded * capacity_);
        rows_ = allocate<int32_t>(padded * capacity_);
        count_.assign(padded, 0);
        best_scores_.assign(num_queries * k, -std::numeric_limits<float>::infinity());
        best_rows_.assign(num_queries * k, -1);
        best_count_.assign(num_queries, 0);
        panel_rows_ = panel_rows_of(steps_);
    }

    // Returns -1, or the part's first row that has no finite norm.
    int64_t add(const Part& part, int64_t num_rows, const int64_t* deleted, int64_t num_deleted) {
        const std::vector<int32_t> live = live_rows(num_rows, deleted, num_deleted);
        norms_ = Norms();
        if (warm_start(part, live)) return bad_row_;
        return scan(part, live) ? bad_row_ : -1;
    }

    // The same of what was converted before.
    int64_t add(const Converted& converted) {
        if (converted.bad >= 0) return converted.bad;
        norms_ = converted.norms;
        if (warm_start(converted.part, converted.live)) return bad_row_;
        const int64_t per_item = groups_per_item();
        std::atomic<int64_t> next_item{0}, next_settled{0};
        std::barrier barrier(threads_);
        run([&](int) {
            Scratch scratch;
            scratch.query = allocate<double>(steps_ * STEP);
            collect_all(converted.part, converted.panels, next_item, per_item, scratch);
            barrier.arrive_and_wait();
            settle_all(converted.part, next_settled, scratch);
        });
        return -1;
    }

    void result(float* scores, int64_t* rows) const {
        std::copy(best_scores_.begin(), best_scores_.end(), scores);
        std::copy(best_rows_.begin(), best_rows_.end(), rows);
    }

    // Writes the query with the largest score of each vector, of equal scores the first one; returns -1, or a row that has no
    // finite norm. The queries are few and packed once. k is of no matter, and the hits stay as they are.
    int64_t find_nearest(const Part& part, int64_t num_rows, int32_t* nearest) const {
        Targets targets{allocate<float>(groups_ * GROUP)};
        std::fill_n(targets.factors.get(), groups_ * GROUP, 0.0f);
        for (int64_t q = 0; q < num_queries_; q++) {
            const float factor = targets.factors[q] = std::ldexp(1.0f, -scale_[q]);
            targets.bounds.include({factor * per_norm_[q], factor * per_rounding_[q]});
            targets.tiny = std::max(targets.tiny, factor * TINY);
        }
        const int64_t size = std::clamp<int64_t>(PANEL_BYTES / 2 / (steps_ * STEP * 2) / GROUP * GROUP, GROUP, 512);
        std::atomic<int64_t> next{0}, bad{-1};
        run([&](int) {
            Vectors vectors;
            vectors.panel.reserve(size, steps_);
            vectors.rows.resize(size);
            vectors.wide = allocate<double>(steps_ * STEP);
            for (int64_t chunk; (chunk = next++) * size < num_rows && bad < 0;) {
                const int64_t first = chunk * size, count = std::min(size, num_rows - first);
                for (int64_t i = 0; i < count; i++) vectors.rows[i] = static_cast<int32_t>(first + i);
                const int64_t row = vectors.panel.convert(part, vectors.rows.data(), count, steps_);
                if (row >= 0) {
                    bad = row;
                } else {
                    find_nearest(part, targets, vectors, nearest + first);
                }
            }
        });
        return bad;
    }

private:
    // Scaling by a power of two changes no digit of a score and keeps products far from overflow and underflow.
    void pack(int64_t q) {
        const float* query = queries_.data() + q * dim_;
        float largest = 0;
        for (int64_t i = 0; i < dim_; i++) largest = std::max(largest, std::fabs(query[i]));
        int exponent = 0;
        if (largest > 0) std::frexp(largest, &exponent);
        scale_[q] = -exponent;
        double square = 0, rounded_square = 0, error = 0;
        for (int64_t i = 0; i < dim_; i++) square += std::ldexp(double{query[i]} * query[i], -2 * exponent);
#ifndef BFLOAT16
        const double by = factor_of(std::sqrt(square), std::ldexp(double{largest}, -exponent), dim_);
        integer_scale_[q] = by > 0 ? static_cast<float>(1 / by) : 0;
#endif
        for (int64_t i = 0; i < dim_; i++) {
            const double exact = std::ldexp(static_cast<double>(query[i]), -exponent);
#ifdef BFLOAT16
            float value = static_cast<float>(exact);
            uint32_t bits;
            std::memcpy(&bits, &value, sizeof bits);
            bits = std::fabs(value) < std::numeric_limits<float>::min() ? 0 : (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
            std::memcpy(&value, &bits, sizeof value);
            const Value copy = static_cast<Value>(bits >> 16);
#else
            const double whole = std::nearbyint(exact * by), value = whole * integer_scale_[q];
            const Value copy = static_cast<Value>(static_cast<int16_t>(whole));
#endif
            // Pairs of dimensions interleaved by query: the layout of an AMX right-hand side.
            Value* tile = packed_.get() + ((q / GROUP * steps_ + i / STEP) * 2 + q / TILE % 2) * TILE_VALUES;
            tile[i % STEP / 2 * STEP + q % TILE * 2 + i % 2] = copy;
            rounded_square += static_cast<double>(value) * value;
            error += (exact - value) * (exact - value);
        }
        const double slack = static_cast<double>((EXACT_SUMS ? 0 : dim_) + 32) * std::ldexp(1.0, -23);
        per_norm_[q] = static_cast<float>(1.001 * (std::sqrt(error) + slack * std::sqrt(square)));
        per_rounding_[q] = static_cast<float>(1.001 * std::sqrt(rounded_square));
    }

    float error_bound(int64_t q, const Norms& norms) const {
        return per_norm_[q] * norms.vector + per_rounding_[q] * norms.rounding + TINY;
    }

    Floats error_bounds(int64_t q, const Norms& norms) const {
        return load(per_norm_.get() + q) * norms.vector + (load(per_rounding_.get() + q) * norms.rounding + TINY);
    }

    void multiply(const Panel& panel, int64_t passage_group, int64_t query_group, Block& out) const {
        const int64_t stride = steps_ * 2 * TILE_VALUES;
        const Value* passages = panel.values.get() + passage_group * stride;
        const Value* queries = packed_.get() + query_group * stride;
#ifdef __AMX_BF16__
        if (amx_) return multiply_amx(passages, queries, steps_, out);
#endif
        multiply_registers(passages, panel.scales.data() + passage_group * GROUP, queries,
                           integer_scale_.get() + query_group * GROUP, steps_, out);
    }

    // Runs body(thread) in all threads, with the matrix units set up.
    template <class Body>
    void run(const Body& body) const {
        in_threads(threads_, [&](int t) {
#ifdef __AMX_BF16__
            std::unique_ptr<AmxTiles> tiles(amx_ ? new AmxTiles : nullptr);
#endif
            body(t);
        });
    }

    // How many query groups one thread takes at a time: enough to reuse a panel, few enough to share the work evenly.
    int64_t groups_per_item() const { return std::clamp<int64_t>(groups_ / (2 * threads_), 1, 16); }

    // First thresholds from a spread sample: the k-th largest of the maxima of tiles of 16 passages is one, since k tiles
    // hold k passages that score no less. Without it the first thousands of passages would all survive.
    bool warm_start(const Part& part, const std::vector<int32_t>& live) {
        const int64_t sample = WARM_ROWS_PER_K * k_ / GROUP * GROUP, num_live = static_cast<int64_t>(live.size());
        if (num_live < 4 * sample || sample / TILE < k_) return false;
        if (*std::min_element(threshold_.get(), threshold_.get() + num_queries_) > -std::numeric_limits<float>::infinity())
            return false;
        // Runs of 16 neighbours are read together but fall into different tiles: neighbours are often alike.
        const int64_t runs = sample / 16;
        std::vector<int32_t> rows(sample);
        for (int64_t r = 0; r < runs; r++)
            for (int64_t i = 0; i < 16; i++) rows[i * runs + r] = live[r * (num_live - 16) / std::max<int64_t>(runs - 1, 1) + i];
        const int64_t num_panels = (sample + panel_rows_ - 1) / panel_rows_;
        std::vector<Panel> panels(num_panels);
        std::atomic<int64_t> next_panel{0}, next_item{0}, bad{-1};
        std::barrier barrier(threads_);
        const int64_t per_item = groups_per_item();
        run([&](int) {
            for (int64_t p; (p = next_panel++) < num_panels;) {
                panels[p].reserve(panel_rows_, steps_);
                const int64_t start = p * panel_rows_;
                const int64_t row = panels[p].convert(part, rows.data() + start, std::min(panel_rows_, sample - start), steps_);
                if (row >= 0) bad = row;
            }
            barrier.arrive_and_wait();
            if (bad >= 0) return;
            auto maxima = allocate<float>(sample / TILE * GROUP);
            Block block;
            for (int64_t item; (item = next_item++) * per_item < groups_;) {
                for (int64_t g = item * per_item; g < std::min(groups_, (item + 1) * per_item); g++) {
                    float* out = maxima.get();
                    for (const Panel& panel : panels)
                        for (int64_t p = 0; p < panel.count / GROUP; p++, out += 2 * GROUP) {
                            multiply(panel, p, g, block);
                            for (int t = 0; t < 2; t++)
                                for (int u = 0; u < GROUP; u += WIDTH) {
                                    const auto& tile = block.tile[t][u / TILE];
                                    Floats most = load(tile[0] + u % TILE);
                                    for (int i = 1; i < TILE; i++) most = larger(load(tile[i] + u % TILE), most);
                                    store(out + t * GROUP + u, most - error_bounds(g * GROUP + u, panel.norms[2 * p + t]));
                                }
                        }
                    for (int u = 0; u < GROUP; u += WIDTH) raise_thresholds(g * GROUP + u, maxima.get() + u, sample / TILE);
                }
            }
        });
        bad_row_ = bad;
        return bad >= 0;
    }

    // values: [count][GROUP], a column per query; each of WIDTH queries' thresholds becomes a value that k of its column reach.
    void raise_thresholds(int64_t q, const float* values, int64_t count) {
        Floats low = load(values), high = low;
        for (int64_t i = 1; i < count; i++) {
            low = smaller(load(values + i * GROUP), low);
            high = larger(load(values + i * GROUP), high);
        }
        for (int round = 0; round < 12; round++) {
            const Floats middle = low + (high - low) * 0.5f;
            Ints reached = {};
            for (int64_t i = 0; i < count; i++) reached -= load(values + i * GROUP) >= middle;
            const Ints enough = reached >= static_cast<int32_t>(k_);
            low = enough ? middle : low;
            high = enough ? high : middle;
        }
        // The larger one keeps padding at +inf and what earlier parts have reached.
        store(threshold_.get() + q, larger(load(threshold_.get() + q), low));
    }

    bool scan(const Part& part, const std::vector<int32_t>& live) {
        const int64_t num_live = static_cast<int64_t>(live.size()), stretch = PANELS * panel_rows_;
        const int64_t num_stretches = (num_live + stretch - 1) / stretch;
        std::vector<std::atomic<int64_t>> next_panel(num_stretches), next_item(num_stretches);
        std::atomic<int64_t> next_settled{0}, bad{-1};
        if (panels_.empty()) {
            panels_.resize(PANELS);
            for (auto& panel : panels_) panel.reserve(panel_rows_, steps_);
        }
        const int64_t per_item = groups_per_item();
        std::barrier barrier(threads_, [&]() noexcept {
            for (const Panel& panel : panels_)
                for (int64_t t = 0; t < (panel.count + TILE - 1) / TILE; t++) norms_.include(panel.norms[t]);
        });
        run([&](int) {
            Scratch scratch;
            scratch.query = allocate<double>(steps_ * STEP);
            for (int64_t s = 0; s < num_stretches; s++) {
                const int64_t begin = s * stretch;
                for (int64_t p; (p = next_panel[s]++) < PANELS;) {
                    const int64_t start = begin + p * panel_rows_;
                    const int64_t rows = std::clamp<int64_t>(num_live - start, 0, panel_rows_);
                    const int64_t row = panels_[p].convert(part, live.data() + start, rows, steps_);
                    if (row >= 0) bad = row;
                }
                barrier.arrive_and_wait();
                if (bad >= 0) return;
                collect_all(part, panels_, next_item[s], per_item, scratch);
                barrier.arrive_and_wait();
            }
            settle_all(part, next_settled, scratch);
        });
        bad_row_ = bad;
        return bad >= 0;
    }

    // The share of a thread: groups of queries as they are free, with all panels.
    void collect_all(const Part& part, const std::vector<Panel>& panels, std::atomic<int64_t>& next_item, int64_t per_item,
                     Scratch& scratch) {
        for (int64_t item; (item = next_item++) * per_item < groups_;)
            for (const Panel& panel : panels)
                for (int64_t g = item * per_item; g < std::min(groups_, (item + 1) * per_item); g++)
                    collect(part, panel, g, scratch);
    }

    void settle_all(const Part& part, std::atomic<int64_t>& next_settled, Scratch& scratch) {
        for (int64_t q; (q = next_settled++) < num_queries_;)
            if (count_[q]) {
                shrink(q, scratch);
                settle(part, q, scratch);
            }
    }

    // Multiplies a panel by 32 queries and appends what reaches a threshold to the queries' candidates.
    void collect(const Part& part, const Panel& panel, int64_t g, Scratch& scratch) {
        const int64_t first = g * GROUP;
        Block block;
        for (int64_t p = 0; p * GROUP < panel.count; p++) {
            multiply(panel, p, g, block);
            bool full = false;
            for (int t = 0; t < 2; t++) {
                const int64_t row0 = p * GROUP + t * TILE;
                const int valid = static_cast<int>(std::min<int64_t>(TILE, panel.count - row0));
                for (int u = 0; u < 2 && valid > 0; u++) {
                    float error[TILE];
                    Floats cut[PARTS];
                    const int64_t q0 = first + u * TILE;
                    for (int part_of = 0; part_of < PARTS; part_of++) {
                        const Floats bounds = error_bounds(q0 + part_of * WIDTH, panel.norms[2 * p + t]);
                        cut[part_of] = load(threshold_.get() + q0 + part_of * WIDTH) - bounds;
                        store(error + part_of * WIDTH, bounds);
                    }
                    const auto& tile = block.tile[t][u];
                    // Four passages at a time: one branch, mostly not taken, for 64 products.
                    for (int i = 0; i < valid; i += 4) {
                        uint64_t hits = 0;
                        for (int j = 0; j < 4 * PARTS; j++) {
                            const Floats products = load(tile[i + j / PARTS] + j % PARTS * WIDTH);
                            hits |= static_cast<uint64_t>(reaches(products, cut[j % PARTS])) << WIDTH * j;
                        }
                        if (valid - i < 4) hits &= (uint64_t{1} << 16 * (valid - i)) - 1;
                        for (; hits; hits &= hits - 1) {
                            const int bit = __builtin_ctzll(hits), lane = bit % TILE, row = i + bit / TILE;
                            const int64_t q = q0 + lane, at = q * capacity_ + count_[q]++;
                            lower_[at] = tile[row][lane] - error[lane];
                            rows_[at] = panel.rows[row0 + row];
                            full |= count_[q] > capacity_ - GROUP;
                        }
                    }
                }
            }
            if (full)
                for (int64_t q = first; q < first + GROUP; q++)
                    if (count_[q] > capacity_ - GROUP) {
                        shrink(q, scratch);
                        // Bounds too wide to drop any (many equal scores, one enormous norm): exact scores always can.
                        if (count_[q] > capacity_ - capacity_ / 8 - GROUP) settle(part, q, scratch);
                    }
        }
    }

    // Raises a query's threshold to a score that k passages reach for certain, and drops the candidates below it.
    void shrink(int64_t q, Scratch& scratch) {
        float* lower = lower_.get() + q * capacity_;
        int32_t* rows = rows_.get() + q * capacity_;
        const int64_t count = count_[q], settled = best_count_[q];
        if (count + settled >= k_) {
            auto& values = scratch.values;
            values.assign(lower, lower + count);
            for (int64_t i = 0; i < settled; i++) values.push_back(std::ldexp(best_scores_[q * k_ + i], scale_[q]));
            threshold_[q] = std::max(threshold_[q], about_kth(values));
        }
        const float cut = threshold_[q] - 2 * error_bound(q, norms_);
        int64_t kept = 0;
#if WIDTH == 16
        for (int64_t i = 0; i < count; i += WIDTH) {
            const Floats value = load(lower + i);
            const Ints row = load<Ints>(rows + i);
            const uint32_t valid = count - i >= WIDTH ? 0xffff : (1u << (count - i)) - 1;
            const uint32_t keep = reaches(value, Floats{} + cut) & valid;
            // Compressed in registers, as compressing stores are slow on some CPUs; overwrites only what was read.
            store(lower + kept, _mm512_maskz_compress_ps(keep, (__m512)value));
            store(rows + kept, _mm512_maskz_compress_epi32(keep, (__m512i)row));
            kept += __builtin_popcount(keep);
        }
#else
        for (int64_t i = 0; i < count; i++) {  // without a branch, which would be hard to predict
            const float value = lower[i];
            lower[kept] = value;
            rows[kept] = rows[i];
            kept += value >= cut;
        }
#endif
        count_[q] = static_cast<int32_t>(kept);
    }

    // A value that at least k of the values reach, and hardly more than k: halving is faster than sorting.
    float about_kth(std::vector<float>& values) const {
        const int64_t count = static_cast<int64_t>(values.size());
        while (values.size() % TILE) values.push_back(-std::numeric_limits<float>::infinity());
        float low = *std::min_element(values.begin(), values.begin() + count);
        float high = *std::max_element(values.begin(), values.begin() + count);
        for (int round = 0; round < 16; round++) {
            const float middle = low + (high - low) * 0.5f;
            int64_t reached = 0;
            for (size_t i = 0; i < values.size(); i += WIDTH)
                reached += __builtin_popcount(reaches(load(&values[i]), Floats{} + middle));
            (reached >= k_ ? low : high) = middle;
            if (reached >= k_ && reached <= k_ + k_ / 16) return low;
        }
        std::nth_element(values.begin(), values.begin() + k_ - 1, values.end(), std::greater<float>());
        return values[k_ - 1];
    }

    // Scores a query's candidates exactly and merges them into its best k; no candidates are left.
    void settle(const Part& part, int64_t q, Scratch& scratch) {
        const int64_t count = count_[q], settled = best_count_[q];
        float* best_scores = best_scores_.data() + q * k_;
        int64_t* best_rows = best_rows_.data() + q * k_;
        widen(queries_.data() + q * dim_, dim_, steps_ * STEP, scratch.query.get());
        auto& rows = scratch.rows;
        auto& scores = scratch.scores;
        rows.assign(rows_.get() + q * capacity_, rows_.get() + q * capacity_ + count);
        scores.resize(count);
        score_rows(part, scratch.query.get(), rows.data(), count, scores.data());
        for (auto& row : rows) row += part.first_row;
        rows.insert(rows.end(), best_rows, best_rows + settled);
        scores.insert(scores.end(), best_scores, best_scores + settled);

        auto& order = scratch.order;
        order.clear();
        for (size_t i = 0; i < rows.size(); i++) order.push_back(uint64_t{descending(scores[i])} << 32 | i);
        std::sort(order.begin(), order.end());
        for (size_t i = 0, j; i < order.size(); i = j) {
            for (j = i + 1; j < order.size() && order[j] >> 32 == order[i] >> 32;) j++;
            if (j - i > 1)
                std::sort(order.begin() + i, order.begin() + j,
                          [&](uint64_t a, uint64_t b) { return rows[static_cast<uint32_t>(a)] < rows[static_cast<uint32_t>(b)]; });
        }
        const int64_t kept = std::min<int64_t>(k_, static_cast<int64_t>(order.size()));
        for (int64_t i = 0; i < kept; i++) {
            best_scores[i] = scores[static_cast<uint32_t>(order[i])];
            best_rows[i] = rows[static_cast<uint32_t>(order[i])];
        }
        best_count_[q] = static_cast<int32_t>(kept);
        count_[q] = 0;
        if (kept == k_) threshold_[q] = std::max(threshold_[q], std::ldexp(best_scores[k_ - 1], scale_[q]));
    }

    // What makes the scores of all queries comparable: the factors that undo their scaling, and the largest bounds.
    struct Targets {
        Buffer<float> factors;
        Norms bounds;
        float tiny = 1e-36f;  // covers scores that underflow
    };

    // The queries that may be the nearest one of a vector.
    struct Candidates {
        static constexpr int CAPACITY = 4 * GROUP;
        float error, cut;  // a query whose product is below `cut` is not the nearest one
        float best;        // exact score of `nearest`, the best one so far whose score is known; -1: none
        int32_t nearest, count;
        float products[CAPACITY];
        int32_t queries[CAPACITY];

        void drop_lower() {
            int32_t kept = 0;
            for (int32_t i = 0; i < count; i++)
                if (products[i] >= cut) {
                    products[kept] = products[i];
                    queries[kept++] = queries[i];
                }
            count = kept;
        }
    };

    // Vectors that one thread handles together, so that they stay in its cache.
    struct Vectors {
        Panel panel;
        std::vector<int32_t> rows;
        std::vector<Candidates> candidates;
        Buffer<double> wide;
    };

    void find_nearest(const Part& part, const Targets& targets, Vectors& vectors, int32_t* nearest) const {
        const Panel& panel = vectors.panel;
        vectors.candidates.resize(panel.count);
        for (int64_t i = 0; i < panel.count; i++) {
            Candidates& one = vectors.candidates[i];
            const Norms& norms = panel.norms[i / TILE];
            one.error = targets.bounds.vector * norms.vector + targets.bounds.rounding * norms.rounding + targets.tiny;
            one.cut = one.best = -std::numeric_limits<float>::infinity();
            one.nearest = -1;
            one.count = 0;
        }
        Block block;
        for (int64_t g = 0; g < groups_; g++) {
            const int valid = static_cast<int>(std::min<int64_t>(GROUP, num_queries_ - g * GROUP));
            const float* factors = targets.factors.get() + g * GROUP;
            for (int64_t p = 0; p * GROUP < panel.count; p++) {
                multiply(panel, p, g, block);
                for (int64_t i = p * GROUP; i < std::min<int64_t>(panel.count, (p + 1) * GROUP); i++) {
                    const auto& tiles = block.tile[i / TILE % 2];
                    const float *low = tiles[0][i % TILE], *high = tiles[1][i % TILE];
                    Candidates& one = vectors.candidates[i];
                    const float cut = one.cut;
                    int hits = 0;
                    for (int lane = 0; lane < TILE; lane++)
                        hits |= (low[lane] * factors[lane] >= cut) | (high[lane] * factors[TILE + lane] >= cut);
                    if (!hits) continue;
                    if (one.count > Candidates::CAPACITY - GROUP) one.drop_lower();
                    if (one.count > Candidates::CAPACITY - GROUP) settle_nearest(part, panel.rows[i], one, vectors.wide.get());
                    for (int lane = 0; lane < valid; lane++) {
                        const float product = (lane < TILE ? low[lane] : high[lane - TILE]) * factors[lane];
                        if (!(product >= one.cut)) continue;
                        one.products[one.count] = product;
                        one.queries[one.count++] = static_cast<int32_t>(g * GROUP + lane);
                        one.cut = std::max(one.cut, product - 2 * one.error);
                    }
                }
            }
        }
        for (int64_t i = 0; i < panel.count; i++) {
            Candidates& one = vectors.candidates[i];
            one.drop_lower();
            if (one.count == 1 && one.nearest < 0) {
                one.nearest = one.queries[0];  // the only one left needs no exact score
            } else {
                settle_nearest(part, panel.rows[i], one, vectors.wide.get());
            }
            nearest[i] = one.nearest;
        }
    }

    // Scores the candidates of a vector exactly and leaves the best one.
    void settle_nearest(const Part& part, int32_t row, Candidates& one, double* wide) const {
        widen(part, row, steps_ * STEP, wide);
        for (int32_t i = 0; i < one.count; i++) {
            const int32_t query = one.queries[i];
            const float score = exact_score(queries_.data() + query * dim_, dim_, wide);
            if (score > one.best || (score == one.best && query < one.nearest)) {
                one.best = score;
                one.nearest = query;
            }
        }
        one.count = 0;
        one.cut = std::max(one.cut, one.best - one.error);
    }

    const int64_t num_queries_, dim_, steps_, k_;
    const int threads_;
    const bool amx_;
    const int64_t groups_, capacity_;
    const std::vector<float> queries_;  // [q][dim]
    Buffer<Value> packed_;              // [group][step][tile][pair of dimensions][query][2]
    Buffer<float> per_norm_, per_rounding_, threshold_;  // [padded q]; thresholds of scaled scores
    Buffer<float> integer_scale_;                        // [padded q]: scale of a query's integers
    std::vector<int> scale_;                             // exponents of two: scaled score = score * 2^scale
    Buffer<float> lower_;                                // [padded q][capacity]: scaled scores less their error bounds
    Buffer<int32_t> rows_;                               // [padded q][capacity]: rows of the part
    std::vector<int32_t> count_;
    std::vector<float> best_scores_;  // [q][k]: exact, sorted
    std::vector<int64_t> best_rows_;
    std::vector<int32_t> best_count_;
    std::vector<Panel> panels_;
    int64_t panel_rows_ = 0, bad_row_ = -1;
    Norms norms_;  // over all passages of the part that were converted so far
};

// ------------------------------------------------------------------------------------------------------ sums of vectors

// Adds each vector to the sum of its target, in the order of the rows, so that the sums are the same for any threads.
void sum_by_target(const Part& part, int64_t num_rows, const int32_t* nearest, int64_t num_targets, int threads, double* sums) {
    const int64_t ranges = std::min<int64_t>(num_targets, 8 * threads), padded_dim = (part.dim + STEP - 1) / STEP * STEP;
    std::atomic<int64_t> next{0};
    in_threads(threads, [&](int) {
        auto vector = allocate<double>(padded_dim);
        for (int64_t r; (r = next++) < ranges;) {
            const int64_t low = r * num_targets / ranges, high = (r + 1) * num_targets / ranges;
            for (int64_t row = 0; row < num_rows; row++) {
                if (nearest[row] < low || nearest[row] >= high) continue;
                widen(part, row, padded_dim, vector.get());
                double* sum = sums + nearest[row] * part.dim;
                for (int64_t i = 0; i < part.dim; i++) sum[i] += vector[i];
            }
        }
    });
}

}  // namespace

// -------------------------------------------------------------------------------------------------------- C interface
// Returned codes: -1 done, >= 0 the row whose vector has no finite norm, -2 out of memory.

extern "C" {

// Whether this process may use AMX; the kernel grants it per process, on request.
int riptide_amx() {
#ifdef __AMX_BF16__
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return 0;
#endif
}

void* riptide_search_new(const float* queries, int64_t num_queries, int64_t dim, int64_t k, int threads, int amx) {
    try {
        return new Search(queries, num_queries, dim, k, threads, amx != 0);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

void riptide_search_free(void* search) { delete static_cast<Search*>(search); }

int64_t riptide_search_add(void* search, const void* vectors, int half, int64_t num_rows, int64_t dim, int64_t first_row,
                           const int64_t* deleted, int64_t num_deleted) {
    try {
        const Part part{static_cast<const char*>(vectors), half != 0, dim, first_row};
        return static_cast<Search*>(search)->add(part, num_rows, deleted, num_deleted);
    } catch (const std::bad_alloc&) {
        return -2;
    }
}

// A part in the form that searches take; it reads the vectors as long as it is there. Null: out of memory.
void* riptide_converted_new(const void* vectors, int half, int64_t num_rows, int64_t dim, int64_t first_row,
                            const int64_t* deleted, int64_t num_deleted) {
    try {
        const Part part{static_cast<const char*>(vectors), half != 0, dim, first_row};
        return new Converted(part, num_rows, deleted, num_deleted);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

void riptide_converted_free(void* converted) { delete static_cast<Converted*>(converted); }

int64_t riptide_search_add_converted(void* search, const void* converted) {
    try {
        return static_cast<Search*>(search)->add(*static_cast<const Converted*>(converted));
    } catch (const std::bad_alloc&) {
        return -2;
    }
}

void riptide_search_result(const void* search, float* scores, int64_t* rows) {
    static_cast<const Search*>(search)->result(scores, rows);
}

// rows [num_queries][count] of vectors, -1 for none; scores of the same shape.
void riptide_score_pairs(const float* queries, int64_t num_queries, int64_t dim, const int64_t* rows, int64_t count,
                         const void* vectors, int half, int threads, float* scores) {
    const Part part{static_cast<const char*>(vectors), half != 0, dim, 0};
    const int64_t padded_dim = (dim + STEP - 1) / STEP * STEP;
    std::atomic<int64_t> next{0};
    in_threads(threads, [&](int) {
        auto query = allocate<double>(padded_dim);
        for (int64_t q; (q = next++) < num_queries;) {
            widen(queries + q * dim, dim, padded_dim, query.get());
            score_rows(part, query.get(), rows + q * count, count, scores + q * count);
        }
    });
}

// Writes the query with the largest score of each vector, of equal scores the first one.
int64_t riptide_search_nearest(const void* search, const void* vectors, int half, int64_t num_rows, int64_t dim,
                               int32_t* nearest) {
    try {
        const Part part{static_cast<const char*>(vectors), half != 0, dim, 0};
        return static_cast<const Search*>(search)->find_nearest(part, num_rows, nearest);
    } catch (const std::bad_alloc&) {
        return -2;
    }
}

// Adds the vectors to sums [num_targets][dim], each to that of its target.
void riptide_sum_by_target(const void* vectors, int half, int64_t num_rows, int64_t dim, const int32_t* nearest,
                           int64_t num_targets, int threads, double* sums) {
    sum_by_target({static_cast<const char*>(vectors), half != 0, dim, 0}, num_rows, nearest, num_targets, threads, sums);
}
}
