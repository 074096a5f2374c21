// Passages of exact search in the CPU's own numbers of 16 bits: bfloat16 where the CPU multiplies it, else integers. The
// integers of a vector have one scale, which makes their norm at most 46,340. So no sum of products exceeds 32 bits
// (Cauchy-Schwarz).

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "registers.h"

namespace {

constexpr int TILE = 16;            // rows of an AMX tile
constexpr int GROUP = 2 * TILE;     // passages or queries of a block
constexpr int STEP = 32;            // values in a tile's row
constexpr int TILE_VALUES = TILE * STEP;
constexpr int64_t PANEL_BYTES = 1 << 20;  // half of a 2 MiB L2: a panel of passages stays there for many queries
constexpr float LARGEST_SQUARE = 1e30f;   // of a norm; mirrored by arrays.py's MAX_NORM
constexpr float TINY = 1e-30f;            // covers products that underflow
constexpr float TINY_NORM = 1e-18f;       // covers squares that underflow; TINY is more than they can matter then

// The same as TINY, and the rounding of scores that underflow, for a query whose scores are multiplied by 2^exponent.
inline float tiny_of(int exponent) { return TINY + std::ldexp(1.0f, exponent - 148); }

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
        norm = {std::sqrt(sum) + TINY_NORM, std::sqrt(joined(error[0] + error[1], plus)) + TINY_NORM};
        return true;
    }
};

// How many passages a panel holds.
inline int64_t panel_rows_of(int64_t steps) {
    return std::clamp<int64_t>(PANEL_BYTES / (steps * STEP * 2) / GROUP * GROUP, 2 * GROUP, 4096);
}

}  // namespace
