// BERT layers in integers, for one thread.
//
// Linear layers multiply bytes. A row of activations is quantised by its own smallest and largest number to unsigned
// bytes, the weights of an output by their largest magnitude to signed bytes. What follows a product (bias, GELU,
// residual sum, layer norm, the next quantisation) is computed in float32 while a block of rows is in the L2 cache.
// Attention multiplies 16-bit integers, as many of its weights would be zero in bytes. Queries, keys and values of a
// head have one scale per text.
//
// Sums of integers are exact, so that they depend on neither their order nor the CPU's instructions.

#include <cmath>

#include "vectors.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t BLOCK = 48;  // rows of which the widest activations fit into the L2 cache
constexpr int STEP = 4;        // bytes that one lane of an instruction multiplies and sums
constexpr int REGISTERS = WIDTH == 16 ? 4 : 2;  // of sums per row: with ROWS rows they fill the CPU's registers
constexpr int ROWS = 6;
constexpr int64_t COLUMNS = REGISTERS * WIDTH;

typedef int16_t SignedHalves __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t UnsignedHalves __attribute__((vector_size(4 * WIDTH)));

// Adds to each lane of `sums` the products of its two signed 16-bit integers of `left` and `right`.
inline Ints dot_pairs(Ints sums, Ints left, Ints right) {
#if defined(__AVX512VNNI__)
    return reinterpret_cast<Ints>(_mm512_dpwssd_epi32(
        reinterpret_cast<__m512i>(sums), reinterpret_cast<__m512i>(left), reinterpret_cast<__m512i>(right)
    ));
#elif defined(__AVX512BW__)
    const __m512i products = _mm512_madd_epi16(reinterpret_cast<__m512i>(left), reinterpret_cast<__m512i>(right));
    return sums + reinterpret_cast<Ints>(products);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i products = _mm256_madd_epi16(reinterpret_cast<__m256i>(left), reinterpret_cast<__m256i>(right));
    return sums + reinterpret_cast<Ints>(products);
#else
    return sums + (left << 16 >> 16) * (right << 16 >> 16) + (left >> 16) * (right >> 16);
#endif
}

// Adds to each lane of `sums` the products of its four unsigned bytes of `left` and signed bytes of `right`. Without an
// instruction for that, even and odd bytes are multiplied in 16 bits each: AVX2's product of bytes saturates.
inline Ints dot(Ints sums, Ints left, Ints right) {
#if defined(__AVX512VNNI__)
    return reinterpret_cast<Ints>(_mm512_dpbusd_epi32(
        reinterpret_cast<__m512i>(sums), reinterpret_cast<__m512i>(left), reinterpret_cast<__m512i>(right)
    ));
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
    return reinterpret_cast<Ints>(_mm256_dpbusd_avx_epi32(
        reinterpret_cast<__m256i>(sums), reinterpret_cast<__m256i>(left), reinterpret_cast<__m256i>(right)
    ));
#else
    const auto bytes = reinterpret_cast<UnsignedHalves>(left);
    const auto weights = reinterpret_cast<SignedHalves>(right);
    sums = dot_pairs(sums, reinterpret_cast<Ints>(bytes & 0xff), reinterpret_cast<Ints>(weights << 8 >> 8));
    return dot_pairs(sums, reinterpret_cast<Ints>(bytes >> 8), reinterpret_cast<Ints>(weights >> 8));
#endif
}

Ints load_ints(const void* from) {
    Ints found;
    std::memcpy(&found, from, sizeof found);
    return found;
}

// x W^T + b. weights: signed bytes in blocks of COLUMNS outputs, each [inner / STEP, COLUMNS, STEP].
struct Linear {
    const int8_t* weights;
    const int32_t* sums;  // of each output's weights
    const float* scales;  // of each output's weights
    const float* bias;
    int64_t inner, outer;
};

// Rows of unsigned bytes: number = (byte - zero) * scale.
struct Quantised {
    int64_t width;
    Buffer<uint8_t> bytes;
    float scales[BLOCK];
    int32_t zeros[BLOCK];

    explicit Quantised(int64_t width, int64_t rows) : width(width), bytes(rows * width) {}

    // Quantises a row. One number that is not finite makes the scale NaN, so that the row's products are NaN.
    void set(int64_t row, const float* from) {
        Floats least[PARTS] = {}, most[PARTS] = {}, spoiled[PARTS] = {};
        for (int64_t i = 0; i < width; i += LANES) {
            for (int part = 0; part < PARTS; ++part) {
                const Floats next = load(from + i + part * WIDTH);
                least[part] = next < least[part] ? next : least[part];
                most[part] = next > most[part] ? next : most[part];
                spoiled[part] += next * 0.0f;
            }
        }
        const float low = joined(least, [](Floats a, Floats b) { return a < b ? a : b; });
        const float high = joined(most, [](Floats a, Floats b) { return a > b ? a : b; });
        const float quotient = 255 / (high - low);  // not finite for rows of zeros and for numbers that are not finite
        const float by = std::isfinite(quotient) ? quotient : 0;
        const Floats zero = by > 0 ? (Floats{} - low * by + ROUNDS) - ROUNDS : Floats{};
        scales[row] = (high - low) / 255 + joined(spoiled, [](Floats a, Floats b) { return a + b; });
        zeros[row] = static_cast<int32_t>(zero[0]);
        uint8_t* to = &bytes[row * width];
        for (int64_t i = 0; i < width; i += WIDTH) {
            Floats value = (load(from + i) * by + ROUNDS) - ROUNDS + zero;
            value = value > 0.0f ? value : Floats{};  // also where it is NaN
            value = value < 255.0f ? value : Floats{} + 255.0f;
            const Ints whole = __builtin_convertvector(value, Ints);
            typedef uint8_t Bytes __attribute__((vector_size(WIDTH)));
            const Bytes narrowed = __builtin_convertvector(whole, Bytes);
            std::memcpy(to + i, &narrowed, sizeof narrowed);
        }
    }
};

// x / 2 (1 + erf(x / sqrt 2)), to 8e-5; 0 below -4.2, and x (to 1e-5 of it) above 4.2.
inline Floats gelu(Floats x) {
    constexpr float END = 4.2f;
    Floats cut = x > END ? Floats{} + END : x;
    cut = cut < -END ? Floats{} - END : cut;
    const Floats square = cut * cut;
    Floats p = square * 1.4486676e-11f - 2.04021802e-9f;
    p = p * square + 1.16602433e-7f;
    p = p * square - 3.69080616e-6f;
    p = p * square + 7.35361024e-5f;
    p = p * square - 9.90049738e-4f;
    p = p * square + 9.4272885e-3f;
    p = p * square - 6.57323628e-2f;
    p = p * square + 3.98575957e-1f;
    return x < -END ? Floats{} : x * (p * cut + 0.5f);
}

// Computes `count` rows, from `row` on, of COLUMNS outputs from `column` on. All loops over registers are unrolled, and
// the function is not inlined: otherwise the compiler keeps the sums in memory.
template <int count, bool with_gelu>
[[gnu::noinline]] void multiply(const Quantised& x, int64_t row, const Linear& linear, int64_t column, float* to, int64_t stride) {
    Ints sums[count][REGISTERS];
#pragma GCC unroll 4
    for (int part = 0; part < REGISTERS; ++part) {
        const Ints weights = load_ints(linear.sums + column + part * WIDTH);
#pragma GCC unroll 6
        for (int r = 0; r < count; ++r) sums[r][part] = weights * -x.zeros[row + r];
    }
    const int8_t* weights = linear.weights + column * linear.inner;
    const uint8_t* bytes = &x.bytes[row * x.width];
    // Of a few tokens the weights come from memory. The first two calls for these outputs fetch the next ones' weights
    // ahead, half of them each; other calls fetch what they read.
    const bool is_ahead = row < 2 * ROWS && column + COLUMNS < linear.outer;
    const int8_t* ahead = weights + (is_ahead ? COLUMNS * linear.inner * (2 + row / ROWS) / 2 : 0);
    for (int64_t i = 0; i < linear.inner; i += STEP, weights += STEP * COLUMNS) {
        Ints right[REGISTERS];
#pragma GCC unroll 4
        for (int part = 0; part < REGISTERS; ++part) right[part] = load_ints(weights + part * STEP * WIDTH);
        for (int64_t line = 0; line < STEP * COLUMNS / 2; line += 64) __builtin_prefetch(ahead + line);
        ahead += STEP * COLUMNS / 2;
#pragma GCC unroll 6
        for (int r = 0; r < count; ++r) {
            int32_t four;
            std::memcpy(&four, bytes + r * x.width + i, sizeof four);
            const Ints left = Ints{} + four;
#pragma GCC unroll 4
            for (int part = 0; part < REGISTERS; ++part) sums[r][part] = dot(sums[r][part], left, right[part]);
        }
    }
#pragma GCC unroll 4
    for (int part = 0; part < REGISTERS; ++part) {
        const int64_t at = column + part * WIDTH;
        const Floats scales = load(linear.scales + at), biases = load(linear.bias + at);
#pragma GCC unroll 6
        for (int r = 0; r < count; ++r) {
            const Floats product = __builtin_convertvector(sums[r][part], Floats);
            const Floats value = product * (scales * x.scales[row + r]) + biases;
            store(to + (row + r) * stride + at, with_gelu ? gelu(value) : value);
        }
    }
}

template <bool with_gelu = false>
void multiply(const Quantised& x, int64_t rows, const Linear& linear, float* to, int64_t stride) {
    for (int64_t column = 0; column < linear.outer; column += COLUMNS) {
        int64_t row = 0;
        for (; row + ROWS <= rows; row += ROWS) multiply<ROWS, with_gelu>(x, row, linear, column, to, stride);
        switch (rows - row) {
            case 5: multiply<5, with_gelu>(x, row, linear, column, to, stride); break;
            case 4: multiply<4, with_gelu>(x, row, linear, column, to, stride); break;
            case 3: multiply<3, with_gelu>(x, row, linear, column, to, stride); break;
            case 2: multiply<2, with_gelu>(x, row, linear, column, to, stride); break;
            case 1: multiply<1, with_gelu>(x, row, linear, column, to, stride); break;
        }
    }
}

constexpr int QUERIES = WIDTH / 2;  // tokens that are computed together; two registers of sums for each
constexpr int PAIR = 2 * WIDTH;     // sums of two registers

typedef int16_t Shorts __attribute__((vector_size(2 * WIDTH)));

// Writes the sums of products of QUERIES rows of `left` [2 pairs], `stride` apart, and `width` columns of `right`
// [pairs, right_width, 2] to `to` [QUERIES, width]; width is a multiple of PAIR.
void multiply_pairs(
    const int16_t* left, int64_t stride, const int16_t* right, int64_t right_width, int64_t pairs, int64_t width,
    int32_t* to
) {
    for (int64_t j = 0; j < width; j += PAIR) {
        Ints sums[QUERIES][2] = {};
        for (int64_t i = 0; i < pairs; ++i) {
            const int16_t* at = right + 2 * (i * right_width + j);
            const Ints low = load_ints(at), high = load_ints(at + 2 * WIDTH);
#pragma GCC unroll 8
            for (int q = 0; q < QUERIES; ++q) {
                int32_t two;
                std::memcpy(&two, left + q * stride + 2 * i, sizeof two);
                const Ints both = Ints{} + two;
                sums[q][0] = dot_pairs(sums[q][0], both, low);
                sums[q][1] = dot_pairs(sums[q][1], both, high);
            }
        }
#pragma GCC unroll 8
        for (int q = 0; q < QUERIES; ++q) {
            std::memcpy(to + q * width + j, &sums[q][0], sizeof(Ints));
            std::memcpy(to + q * width + j + WIDTH, &sums[q][1], sizeof(Ints));
        }
    }
}

// Returns 2^x for x <= 0, to 4e-6 of it; 0 below -60.
inline Floats power_of_two(Floats x) {
    const Floats rounded = x + ROUNDS, f = x - (rounded - ROUNDS);
    Floats p = f * 9.66637e-3f + 5.592198e-2f;
    p = p * f + 2.4022349e-1f;
    p = p * f + 6.9312105e-1f;
    p = p * f + 1.0f;
    Ints power, bits;
    std::memcpy(&power, &rounded, sizeof power);  // the lowest bits are the integer
    std::memcpy(&bits, &p, sizeof bits);
    bits += power << 23;
    std::memcpy(&p, &bits, sizeof p);
    return x < -60.0f ? Floats{} : p;
}

// Reduces the lanes with `join`: pairs at half the width, then at a quarter, and so on.
template <class Values, class Join>
auto joined_lanes(Values values, Join join) {
    for (int step = WIDTH / 2; step > 0; step /= 2) values = join(values, __builtin_shuffle(values, LANE ^ step));
    return values[0];
}

constexpr int64_t KEYS = 512;            // keys whose weights have one scale
constexpr float LARGEST_VALUE = 2047;    // magnitudes of quantised numbers
constexpr float LARGEST_WEIGHT = 32767;
constexpr float LARGEST_SUM = 2147483520;  // of products: the largest float32 below 2^31

// The weights of one query for a block of keys: 2^(factor (logit - highest)) * scale, as integers.
struct Weights {
    int32_t highest;
    float scale;
    int32_t total;  // of the integers
};

// Quantises the weights of the first `seen` of `width` logits; those of the others are 0. The scale is as large as the
// sum of the weights allows, so that one large weight does not make many small ones 0.
Weights weigh(const int32_t* logits, int64_t seen, int64_t width, float factor, float* scratch, int16_t* to) {
    const auto higher = [](Ints a, Ints b) { return a > b ? a : b; };
    const auto valid = [&](int64_t j) { return LANE + static_cast<int32_t>(j) < static_cast<int32_t>(seen); };
    const int64_t unmasked = seen / WIDTH * WIDTH;
    Ints most = Ints{} + logits[0];
    for (int64_t j = 0; j < unmasked; j += WIDTH) most = higher(most, load_ints(logits + j));
    if (unmasked < seen) most = valid(unmasked) ? higher(most, load_ints(logits + unmasked)) : most;
    const int32_t highest = joined_lanes(most, higher);
    Floats sums[PARTS] = {};
    for (int64_t j = 0; j < width; j += LANES) {
        for (int part = 0; part < PARTS; ++part) {
            const int64_t at = j + part * WIDTH;
            const Floats below = __builtin_convertvector(load_ints(logits + at) - highest, Floats);
            const Floats weight = valid(at) ? power_of_two(below * factor) : Floats{};
            sums[part] += weight;
            store(scratch + at, weight);
        }
    }
    const float sum = joined(sums, [](Floats a, Floats b) { return a + b; });
    const float room = (LARGEST_SUM / LARGEST_VALUE - KEYS) / sum;
    const float scale = room < LARGEST_WEIGHT ? room : LARGEST_WEIGHT;
    Ints total = {};
    for (int64_t j = 0; j < width; j += WIDTH) {
        const Floats weight = load(scratch + j) * scale + ROUNDS;
        Ints bits;
        std::memcpy(&bits, &weight, sizeof bits);
        const Ints weights = bits & 0xffff;
        total += weights;
        const Shorts narrowed = __builtin_convertvector(weights, Shorts);
        std::memcpy(to + j, &narrowed, sizeof narrowed);
    }
    return {highest, scale, joined_lanes(total, [](Ints a, Ints b) { return a + b; })};
}

// Keys and values of prompts: a tensor with contiguous rows. Strides are in numbers.
struct Prompts {
    const float* numbers;  // null: there are no prompts
    int64_t kind, prompt, head, column;  // strides of keys and values, prompts, heads, columns
    const int64_t* rows;                 // the prompt of each text
    const int64_t* lengths;              // the length of each prompt
};

// The rows of a text's queries, keys or values of one head: first those of a prompt, then those of its tokens.
struct HeadRows {
    const float *prompt, *own;
    int64_t before, column, stride;

    const float* operator[](int64_t j) const {
        return j < before ? prompt + j * column : own + (j - before) * stride;
    }
};

// The scale with which numbers become integers; `spoiled` is NaN if one of them is not finite, else 0.
struct Scale {
    float step, spoiled;

    Scale(const HeadRows& rows, int64_t count, int64_t size, float largest) {
        const auto higher = [](Floats a, Floats b) { return a > b ? a : b; };
        Floats most = {}, odd = {};
        for (int64_t j = 0; j < count; ++j) {
            const float* row = rows[j];
            for (int64_t d = 0; d < size; d += WIDTH) {
                const Floats next = load(row + d), magnitude = next < 0.0f ? -next : next;
                most = higher(magnitude, most);
                odd += next * 0.0f;
            }
        }
        step = joined_lanes(most, higher) / largest;
        spoiled = joined_lanes(odd, [](Floats a, Floats b) { return a + b; });
    }

    float inverse() const { return step > 0 ? 1 / step : 0; }
};

// Returns the integers closest to WIDTH numbers, times `by`; any integer for a number that is not finite.
inline Ints rounded(const float* from, float by) {
    const Floats sum = load(from) * by + ROUNDS;
    Ints bits;
    std::memcpy(&bits, &sum, sizeof bits);
    return bits << 16 >> 16;
}

// Writes a row's integers in pairs, `stride` apart.
inline void write_row(const float* row, int64_t size, float by, int16_t* to, int64_t stride) {
    for (int64_t d = 0; d < size; d += WIDTH) {
        const Shorts integers = __builtin_convertvector(rounded(row + d, by), Shorts);
        if (stride == 2) {
            std::memcpy(to + d, &integers, sizeof integers);
        } else {
            int32_t pairs[WIDTH / 2];
            std::memcpy(pairs, &integers, sizeof integers);
            for (int pair = 0; pair < WIDTH / 2; ++pair) std::memcpy(to + (d / 2 + pair) * stride, &pairs[pair], 4);
        }
    }
}

// Attention over a packed batch; see riptide_int8_attend.
void attend(
    const float* inward, int64_t texts, const int64_t* lengths, int64_t heads, int64_t size, const Prompts& prompts,
    float* out
) {
    const int64_t across = heads * size, wide = (size + PAIR - 1) / PAIR * PAIR, half = size / 2;
    const float largest = std::floor(std::sqrt(1073741824.0f / size));  // logits, and their differences, fit into Ints
    Buffer<int16_t> queries, keys, values, weights(QUERIES * KEYS);
    Buffer<int32_t> logits(QUERIES * KEYS), sums(QUERIES * wide);
    Buffer<float> scratch(KEYS), outputs(QUERIES * size);
    for (int64_t text = 0, first = 0; text < texts; first += lengths[text++]) {
        const int64_t own = lengths[text], rows = (own + QUERIES - 1) / QUERIES * QUERIES;
        const int64_t which = prompts.numbers ? prompts.rows[text] : 0;
        const int64_t before = prompts.numbers ? prompts.lengths[which] : 0;
        const int64_t seen = before + own, width = (seen + PAIR - 1) / PAIR * PAIR;
        queries.assign(rows * size, 0);
        keys.assign(2 * half * width, 0);
        values.assign((width + 1) / 2 * 2 * wide, 0);
        for (int64_t head = 0; head < heads; ++head) {
            const float* tokens = inward + first * 3 * across + head * size;
            const float* prompt = before ? prompts.numbers + which * prompts.prompt + head * prompts.head : nullptr;
            const HeadRows query{nullptr, tokens, 0, 0, 3 * across};
            const HeadRows key{prompt, tokens + across, before, prompts.column, 3 * across};
            const HeadRows value{
                before ? prompt + prompts.kind : nullptr, tokens + 2 * across, before, prompts.column, 3 * across
            };
            const Scale by_query(query, own, size, largest), by_key(key, seen, size, largest);
            const Scale by_value(value, seen, size, LARGEST_VALUE);
            for (int64_t j = 0; j < own; ++j) write_row(query[j], size, by_query.inverse(), &queries[j * size], 2);
            for (int64_t j = 0; j < seen; ++j) write_row(key[j], size, by_key.inverse(), &keys[2 * j], 2 * width);
            for (int64_t j = 0; j < seen; j += 2)
                for (int64_t d = 0; d < size; d += WIDTH) {
                    const Ints even = rounded(value[j] + d, by_value.inverse());
                    const Ints odd = j + 1 < seen ? rounded(value[j + 1] + d, by_value.inverse()) : Ints{};
                    const Ints both = (even & 0xffff) | odd << 16;
                    std::memcpy(&values[j * wide + 2 * d], &both, sizeof both);
                }
            const float factor = by_query.step * by_key.step * 1.44269504f / std::sqrt(static_cast<float>(size));
            const float spoiled = by_query.spoiled + by_key.spoiled + by_value.spoiled + factor * 0.0f;
            for (int64_t row = 0; row < own; row += QUERIES) {
                const int count = own - row < QUERIES ? own - row : QUERIES;
                int32_t highest[QUERIES];
                float total[QUERIES];
                for (int64_t from = 0; from < seen; from += KEYS) {
                    const int64_t block = seen - from < KEYS ? seen - from : KEYS;
                    const int64_t columns = (block + PAIR - 1) / PAIR * PAIR;
                    multiply_pairs(
                        &queries[row * size], size, &keys[2 * from], width, half, columns, logits.data()
                    );
                    Weights latest[QUERIES];
                    for (int q = 0; q < count; ++q)
                        latest[q] = weigh(
                            &logits[q * columns], block, columns, factor, scratch.data(), &weights[q * columns]
                        );
                    multiply_pairs(
                        weights.data(), columns, &values[from * wide], wide, (block + 1) / 2, wide, sums.data()
                    );
                    for (int q = 0; q < count; ++q) {
                        const auto weight = [&](int32_t below, int32_t above) {
                            return power_of_two(Floats{} + (float(below) - float(above)) * factor)[0];
                        };
                        float kept = 1, by = 1 / latest[q].scale;  // factors of the blocks before, and of this one
                        if (from == 0 || latest[q].highest > highest[q]) {
                            if (from) kept = weight(highest[q], latest[q].highest);
                            highest[q] = latest[q].highest;
                        } else {
                            by = weight(latest[q].highest, highest[q]) / latest[q].scale;
                        }
                        total[q] = (from ? total[q] * kept : 0) + static_cast<float>(latest[q].total) * by;
                        for (int64_t d = 0; d < size; d += WIDTH) {
                            float* output = &outputs[q * size + d];
                            const Floats before_it = from ? load(output) * kept : Floats{};
                            const Floats product =
                                __builtin_convertvector(load_ints(&sums[q * wide + d]), Floats) * by;
                            store(output, before_it + product);
                        }
                    }
                }
                for (int q = 0; q < count; ++q) {
                    const float by = by_value.step / total[q] + spoiled;
                    float* to = out + (first + row + q) * across + head * size;
                    for (int64_t d = 0; d < size; d += WIDTH) store(to + d, load(&outputs[q * size + d]) * by);
                }
            }
        }
    }
}

// A BERT layer: the projections of attention, and the two of the feed-forward network.
struct Layer {
    Linear inward, outward, widen, narrow;
    const float* norms[4];  // weight and bias of the layer norm after attention, then of that at the end
};

// Writes x W^T + b, [rows, outer], of the float32 rows x, [rows, inner].
void project(const float* x, int64_t rows, const Linear& linear, Quantised& bytes, float* to) {
    for (int64_t first = 0; first < rows; first += BLOCK) {
        const int64_t count = rows - first < BLOCK ? rows - first : BLOCK;
        for (int64_t row = 0; row < count; ++row) bytes.set(row, x + (first + row) * linear.inner);
        multiply(bytes, count, linear, to + first * linear.outer, linear.outer);
    }
}

// What follows attention in a layer: replaces the hidden states before the layer by those after it, [rows, width].
class AfterAttention {
    Quantised bytes, wide_bytes;
    Buffer<float> wide, sum;

public:
    AfterAttention(const Layer& layer, int64_t rows)
        : bytes(layer.outward.inner, rows), wide_bytes(layer.narrow.inner, rows), wide(rows * layer.widen.outer),
          sum(rows * layer.outward.outer) {}

    // attended: outputs of attention, [rows, width].
    void run(float* hidden, const float* attended, int64_t rows, const Layer& layer, float epsilon) {
        const int64_t width = layer.outward.outer, wider = layer.widen.outer;
        for (int64_t first = 0; first < rows; first += BLOCK) {
            const int64_t count = rows - first < BLOCK ? rows - first : BLOCK;
            float* states = hidden + first * width;
            project(attended + first * width, count, layer.outward, bytes, sum.data());
            add_and_normalize(states, sum.data(), count, width, layer.norms[0], layer.norms[1], epsilon);
            for (int64_t row = 0; row < count; ++row) bytes.set(row, states + row * width);
            multiply<true>(bytes, count, layer.widen, wide.data(), wider);
            project(wide.data(), count, layer.narrow, wide_bytes, sum.data());
            add_and_normalize(states, sum.data(), count, width, layer.norms[2], layer.norms[3], epsilon);
        }
    }
};

}  // namespace

// Orders weights [outer, inner] for the products; inner is a multiple of 16, outer of 64.
extern "C" void riptide_int8_pack(const int8_t* weights, int64_t outer, int64_t inner, int8_t* to) {
    for (int64_t column = 0; column < outer; column += COLUMNS)
        for (int64_t i = 0; i < inner; i += STEP)
            for (int64_t c = 0; c < COLUMNS; ++c)
                for (int64_t byte = 0; byte < STEP; ++byte) *to++ = weights[(column + c) * inner + i + byte];
}

// Writes x W^T + b, [rows, outer], of the float32 rows x, [rows, inner].
extern "C" void riptide_int8_linear(const float* x, int64_t rows, const Linear* linear, float* to) {
    Quantised bytes(linear->inner, BLOCK);
    project(x, rows, *linear, bytes, to);
}

// Computes attention over a packed batch.
//
// inward: queries, keys and values, [tokens, 3, heads, size]. lengths: tokens of each text. prompts: null, or keys and
// values with the strides kind, prompt, head and column. rows: the prompt of each text. prompt_lengths: columns of each
// prompt. out: [tokens, heads, size].
extern "C" void riptide_int8_attend(
    const float* inward, int64_t texts, const int64_t* lengths, int64_t heads, int64_t size, const float* prompts,
    int64_t kind, int64_t prompt, int64_t head, int64_t column, const int64_t* rows, const int64_t* prompt_lengths,
    float* out
) {
    attend(inward, texts, lengths, heads, size, {prompts, kind, prompt, head, column, rows, prompt_lengths}, out);
}

// Replaces the hidden states before `count` layers by those after them, [tokens, width].
//
// layer_stride: between the prompts of two layers. The other arguments are those of riptide_int8_attend.
extern "C" void riptide_int8_layers(
    float* hidden, const Layer* layers, int64_t count, float epsilon, int64_t texts, const int64_t* lengths,
    int64_t heads, const float* prompts, int64_t kind, int64_t prompt, int64_t head, int64_t column,
    const int64_t* rows, const int64_t* prompt_lengths, int64_t layer_stride
) {
    int64_t tokens = 0;
    for (int64_t text = 0; text < texts; ++text) tokens += lengths[text];
    const int64_t width = layers->outward.outer, most = tokens < BLOCK ? tokens : BLOCK;
    Quantised bytes(width, most);
    Buffer<float> inward(tokens * 3 * width), attended(tokens * width);
    AfterAttention after(*layers, most);
    for (const Layer* layer = layers; layer < layers + count; ++layer, prompts += layer_stride) {
        project(hidden, tokens, layer->inward, bytes, inward.data());
        const Prompts own{prompts, kind, prompt, head, column, rows, prompt_lengths};
        attend(inward.data(), texts, lengths, heads, width / heads, own, attended.data());
        after.run(hidden, attended.data(), tokens, *layer, epsilon);
    }
}
