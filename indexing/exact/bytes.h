// Passages and queries of exact search in 8 bits, for a few queries: the time of their search is that of reading the
// passages, and these are half as many bytes as in 16 bits.
//
// The passages of a panel have a center c, their mean, as many models give all vectors a large part in common. A passage p
// is c + d, and d becomes d' = scale * integers of at most 127. A query q becomes q' = scale * (128 * high + low) with
// integers of at most 64. All of these are bytes, and sums of their products are exact in 32 bits. The float32 number s
// stands for q.c + q'.d', in which q.c is a sum in float64, once per query and panel. So
//
//     |q.p - s| = |q.d - q'.d' + rounding| = |(q - q').d + q'.(d - d') + rounding|
//               <= |q - q'| |d| + |q'| |d - d'| + |rounding|                                        (Cauchy-Schwarz)
//
// Rounding in float32 changes a number by a share of at most u = 2^-24. Let r = |scale * 128 * high| + |scale * low|, which
// is at least |q'|. With |p| <= |c| + |d| and |d'| <= |d| + |d - d'|, the roundings are those of
//
//   - the product q'.d' of the integers: five, of numbers of at most r |d'|;
//   - d, and its difference to d', in the norm of that difference: u (|d| + |d'| + |d - d'|), times |q'|;
//   - the sum with q.c, the bound and its comparison: five, of numbers of at most |q| |c| + r |d'|;
//   - a threshold that is an exact score: u |q| |p|.
//
// Together they stay below 16 u (r + |q|) (|c| + |d| + |d - d'|). So the bound is
//
//     E = (|q - q'| + t) |d| + (|q'| + t) |d - d'| + t |c| + tiny,    t = 64 u (r + |q|),
//
// in which factors of 1.001 cover sums of squares and the rounding of the bound itself, and tiny covers numbers that
// underflow: queries are scaled to a largest magnitude between 1/2 and 1.

#pragma once

#include <numeric>

#include "passages.h"

namespace {

// With up to this many queries, the products of bytes take less time than those of 16 bits (docs/measurements/search.md).
// Without instructions for them there are no bytes.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr int64_t FEW_BYTES = 32;
#else
constexpr int64_t FEW_BYTES = WIDTH >= 8 ? 12 : 0;
#endif
constexpr int64_t FEW_BYTES_AMX = 4;  // computed, not measured: tiles multiply 32 queries in the time of the bytes of four

constexpr int QUAD = 4;                    // values that a lane sums at once
constexpr int HIGH = 128;                  // a query's integer is HIGH * high + low
constexpr int MOST = 64;                   // largest magnitude of high and low
constexpr int OFFSET = 128;                // added to a passage's integers, as the CPU multiplies unsigned by signed bytes
constexpr int64_t MAX_BYTE_DIM = 1 << 17;  // 255 * MOST * dim does not exceed 32 bits

// Adds to each lane of `sums` the products of its four unsigned bytes and of four signed bytes of at most MOST. Pairs of
// them do not exceed 16 bits.
inline Ints dot_bytes(Ints sums, Ints passages, Ints queries) {
#if WIDTH == 16 && defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)passages, (__m512i)queries);
#elif WIDTH == 16
    const __m512i pairs = _mm512_maddubs_epi16((__m512i)passages, (__m512i)queries);
    return sums + (Ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif WIDTH == 8 && defined(__AVXVNNI__)
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)passages, (__m256i)queries);
#elif WIDTH == 8
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)passages, (__m256i)queries);
    return sums + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
    return sums;  // FEW_BYTES is 0
#endif
}

// The passages of a panel, as [group][quad][passage][4]. Padding has no effect: queries are zero beyond dim, and scores of
// passages beyond the panel's count are ignored.
struct Bytes {
    Buffer<uint8_t> values;
    std::vector<float> center;                    // with zeros beyond dim
    std::vector<float> scales, norms, roundings;  // per passage: the scale, and upper bounds of |d| and |d - d'|

    Bytes(const Part& part, const Panel& panel, int64_t steps) : center(steps * STEP) {
        const int64_t padded = (panel.count + GROUP - 1) / GROUP * GROUP, quads = steps * STEP / QUAD;
        values = allocate<uint8_t>(padded * steps * STEP);
        std::fill_n(values.get(), padded * steps * STEP, uint8_t{0});
        for (auto* of_passages : {&scales, &norms, &roundings}) of_passages->resize(padded);
        for (int64_t i = 0; i < panel.count; i++)
            with_row(part, panel.rows[i], [&](const auto* row) { add_to_center(row, part.dim, 1.0f / panel.count); });
        std::vector<uint8_t> copy(steps * STEP);
        for (int64_t i = 0; i < panel.count; i++) {
            with_row(part, panel.rows[i], [&](const auto* row) { round(row, part.dim, i, copy.data()); });
            uint8_t* out = values.get() + (i / GROUP * quads * GROUP + i % GROUP) * QUAD;
            for (int64_t j = 0; j < quads; j++) std::memcpy(out + j * GROUP * QUAD, copy.data() + j * QUAD, QUAD);
        }
    }

private:
    template <class T>
    void add_to_center(const T* row, int64_t dim, float share) {
        for (size_t i = 0; i < center.size(); i += WIDTH)
            store(&center[i], load(&center[i]) + load_values(row, dim, i) * share);
    }

    template <class T>
    void round(const T* row, int64_t dim, int64_t passage, uint8_t* out) {
        const auto difference = [&](size_t i) { return load_values(row, dim, i) - load(&center[i]); };
        Floats square = {}, error = {}, most = {};
        for (size_t i = 0; i < center.size(); i += WIDTH) {
            const Floats value = difference(i);
            square += value * value;
            most = larger(larger(value, -value), most);
        }
        const float norm = std::sqrt(joined(square, plus)), by = norm > 1e-15f ? 127 / joined(most, larger) : 0;
        const float scale = by > 0 ? 1 / by : 0;
        for (size_t i = 0; i < center.size(); i += WIDTH) {
            const Floats value = difference(i), copy = (value * by + ROUNDS) - ROUNDS, off = value - copy * scale;
            error += off * off;
            store(out + i, __builtin_convertvector(__builtin_convertvector(copy, Ints) + OFFSET, Octets));
        }
        scales[passage] = scale;
        norms[passage] = norm + TINY_NORM;
        roundings[passage] = std::sqrt(joined(error, plus)) + TINY_NORM;
    }
};

// Queries, and what their products with a panel and the bounds on them take from them.
struct ByteQueries {
    struct Terms {
        float scale, per_norm, per_rounding, per_center, tiny;
        int32_t offset[2];             // what OFFSET adds to the sums of high and low
        float center_score, constant;  // q.c, and t |c| + tiny
    };

    ByteQueries(int64_t num_queries, int64_t steps)
        : quads(steps * STEP / QUAD), terms(num_queries), values(allocate<int32_t>(num_queries * quads * 2)),
          exact_(num_queries * steps * STEP) {
        std::fill_n(values.get(), num_queries * quads * 2, 0);
    }

    // Rounds a query, multiplied by 2^exponent.
    void round(int64_t q, const float* query, int64_t dim, int exponent) {
        double* exact = exact_.data() + q * quads * QUAD;
        double most = 0, square = 0, rounded = 0, error = 0, squares[2] = {};
        for (int64_t i = 0; i < dim; i++) {
            exact[i] = std::ldexp(static_cast<double>(query[i]), exponent);
            most = std::max(most, std::fabs(exact[i]));
        }
        Terms& to = terms[q] = Terms();
        to.tiny = tiny_of(exponent);
        to.scale = static_cast<float>(most / (HIGH * MOST));
        for (int64_t i = 0; i < dim; i++) {
            const int whole = to.scale > 0 ? static_cast<int>(std::nearbyint(exact[i] / to.scale)) : 0;
            const int high = (whole + HIGH / 2) >> 7, parts[2] = {high, whole - HIGH * high};
            for (int part = 0; part < 2; part++) {
                const auto byte = static_cast<int8_t>(parts[part]);
                std::memcpy(reinterpret_cast<char*>(&values[(q * quads + i / QUAD) * 2 + part]) + i % QUAD, &byte, 1);
                to.offset[part] += OFFSET * parts[part];
                squares[part] += parts[part] * parts[part];
            }
            const double copy = static_cast<double>(whole) * to.scale;
            square += exact[i] * exact[i];
            rounded += copy * copy;
            error += (exact[i] - copy) * (exact[i] - copy);
        }
        const double r = to.scale * (HIGH * std::sqrt(squares[0]) + std::sqrt(squares[1]));
        const double t = std::ldexp(r + std::sqrt(square), -18);
        to.per_norm = static_cast<float>(1.001 * (std::sqrt(error) + t));
        to.per_rounding = static_cast<float>(1.001 * (std::sqrt(rounded) + t));
        to.per_center = static_cast<float>(1.001 * t);
    }

    // Takes the center of the next panel.
    void use_center(const std::vector<float>& center) {
        double square = 0;
        for (const float value : center) square += static_cast<double>(value) * value;
        for (size_t q = 0; q < terms.size(); q++) {
            const double score = std::inner_product(center.begin(), center.end(), exact_.begin() + q * center.size(), 0.0);
            terms[q].center_score = static_cast<float>(score);
            terms[q].constant = terms[q].per_center * static_cast<float>(std::sqrt(square)) + terms[q].tiny;
        }
    }

    const int64_t quads;
    std::vector<Terms> terms;
    const Buffer<int32_t> values;  // [q][quad][high, low], of which each is QUAD bytes

private:
    std::vector<double> exact_;  // [q][dimension]
};

// Registers of passages that are multiplied with COUNT queries at once: their sums fill the CPU's registers.
template <int COUNT>
constexpr int REGISTERS = std::min(GROUP / WIDTH, (WIDTH == 16 ? 8 : 4) / COUNT);

// Scores of consecutive passages and queries, and their bounds.
template <int COUNT>
struct ByteScores {
    Floats score[COUNT][REGISTERS<COUNT>], error[COUNT][REGISTERS<COUNT>];
};

// Passages from `first` on, a multiple of the registers that are within one group; queries from `first_query` on.
template <int COUNT>
inline void score_bytes(const Bytes& bytes, int64_t first, const ByteQueries& queries, int64_t first_query,
                        ByteScores<COUNT>& out) {
    constexpr int SPAN = REGISTERS<COUNT>;
    const int64_t quads = queries.quads;
    const uint8_t* passages = bytes.values.get() + (first / GROUP * quads * GROUP + first % GROUP) * QUAD;
    const int32_t* values = queries.values.get() + first_query * quads * 2;
    Ints sums[COUNT][2][SPAN] = {};
    for (int64_t quad = 0; quad < quads; quad++, passages += GROUP * QUAD, values += 2) {
        Ints left[SPAN];
#pragma GCC unroll 4
        for (int r = 0; r < SPAN; r++) left[r] = load<Ints>(passages + r * WIDTH * QUAD);
#pragma GCC unroll 4
        for (int q = 0; q < COUNT; q++)
#pragma GCC unroll 2
            for (int part = 0; part < 2; part++) {
                const Ints right = Ints{} + values[q * quads * 2 + part];
#pragma GCC unroll 4
                for (int r = 0; r < SPAN; r++) sums[q][part][r] = dot_bytes(sums[q][part][r], left[r], right);
            }
    }
#pragma GCC unroll 4
    for (int q = 0; q < COUNT; q++) {
        const ByteQueries::Terms& query = queries.terms[first_query + q];
#pragma GCC unroll 4
        for (int r = 0; r < SPAN; r++) {
            const int64_t at = first + r * WIDTH;
            const Floats high = __builtin_convertvector(sums[q][0][r] - query.offset[0], Floats);
            const Floats low = __builtin_convertvector(sums[q][1][r] - query.offset[1], Floats);
            out.score[q][r] = (high * HIGH + low) * (load(&bytes.scales[at]) * query.scale) + query.center_score;
            out.error[q][r] = load(&bytes.norms[at]) * query.per_norm +
                              (load(&bytes.roundings[at]) * query.per_rounding + query.constant);
        }
    }
}

}  // namespace
