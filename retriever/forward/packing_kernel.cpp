// Attention over a packed (unpadded) batch, and the residual sum with layer norm, for one thread. torch's attention
// takes rows padded to the longest text, and spends most of its time on overhead for texts of a dozen tokens. This
// kernel converts one text and one head at a time to float32 with transposed keys, which stay in the L1 cache. If the
// CPU multiplies tiles of bfloat16, it uses these instead.
//
// Tiles sum in another order; `riptide_tiles` says whether they are used, and the numerics class names it.

#include <limits>

#include "vectors.h"

#if defined(__AMX_BF16__)
#define TILES 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

// Tokens that are computed together, so that each key is read once for them: as many as have their sums in registers,
// of which there are 32 with AVX-512, else 16.
constexpr int QUERIES = WIDTH / 2;

constexpr float LEAST = -87;  // below it, e^x is close to the smallest number

// Returns e^x for x <= 0, to 2 units in the last place; below -87, e^-87, which does not change a sum that has a 1.
Floats exponential(Floats x) {
    x = x < LEAST ? Floats{} + LEAST : x;
    const Floats rounded = x * 1.44269504f + ROUNDS;
    const Floats number = rounded - ROUNDS;
    Floats f = x - number * 0.693359375f;
    f = f - number * -2.12194440e-4f;
    Floats p = f * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * f * f + f + 1.0f;
    Ints power, bits;
    std::memcpy(&power, &rounded, sizeof power);  // the lowest bits are the integer
    std::memcpy(&bits, &p, sizeof bits);
    bits += power << 23;
    std::memcpy(&p, &bits, sizeof p);
    return x == x ? p : x;
}

// Replaces the first `seen` of `width` logits by e^(scale (logit - highest)), the others by e^-87; returns the sum.
float softmax(float* logits, int64_t seen, int64_t width, float scale) {
    for (int64_t j = seen / WIDTH * WIDTH; j < width; j += WIDTH) {
        const Ints behind = LANE + static_cast<int32_t>(j) >= static_cast<int32_t>(seen);
        store(logits + j, behind ? Floats{} + std::numeric_limits<float>::lowest() : load(logits + j));
    }
    Floats most[PARTS], sums[PARTS] = {};
    for (int part = 0; part < PARTS; ++part) most[part] = load(logits + part * WIDTH);
    for (int64_t j = LANES; j < width; j += LANES) {
        for (int part = 0; part < PARTS; ++part) {
            const Floats next = load(logits + j + part * WIDTH);
            most[part] = next > most[part] ? next : most[part];
        }
    }
    const float highest = joined(most, [](Floats a, Floats b) { return a > b ? a : b; });
    for (int64_t j = 0; j < width; j += LANES) {
        for (int part = 0; part < PARTS; ++part) {
            float* at = logits + j + part * WIDTH;
            const Floats weights = exponential((load(at) - highest) * scale);
            store(at, weights);
            sums[part] += weights;
        }
    }
    return joined(sums, [](Floats a, Floats b) { return a + b; });
}

// Writes the product of QUERIES rows of `left`, `stride` apart, and `right` [inner, width] to `to` [QUERIES, width].
void product(const float* left, int64_t stride, const float* right, int64_t inner, int64_t width, float* to) {
    for (int64_t j = 0; j < width; j += LANES) {
        Floats sums[QUERIES][PARTS] = {};
        for (int64_t i = 0; i < inner; ++i) {
#pragma GCC unroll 8
            for (int q = 0; q < QUERIES; ++q)
#pragma GCC unroll 4
                for (int part = 0; part < PARTS; ++part)
                    sums[q][part] += left[q * stride + i] * load(right + i * width + j + part * WIDTH);
        }
#pragma GCC unroll 8
        for (int q = 0; q < QUERIES; ++q)
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; ++part) store(to + q * width + j + part * WIDTH, sums[q][part]);
    }
}

// Keys and values of prompts: a tensor with contiguous rows. Strides are in numbers.
template <class T>
struct Prompts {
    const T* numbers;  // null: there are no prompts
    int64_t kind, prompt, head, column;  // strides of keys and values, prompts, heads, columns
    const int64_t* rows;                 // the prompt of each text
    const int64_t* lengths;              // the length of each prompt

    // Returns the key of column `j` of a prompt; its value is `kind` numbers after it.
    const T* key(int64_t which, int64_t at, int64_t j) const {
        return numbers + which * prompt + at * head + j * column;
    }
};

template <class T>
void attend(
    const T* inward, int64_t texts, const int64_t* lengths, int64_t heads, int64_t size, Prompts<T> prompts, T* out
) {
    const int64_t across = heads * size, wide = whole(size);
    const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(size));
    Buffer<float> keys, values, logits, queries(QUERIES * wide);
    for (int64_t text = 0, first = 0; text < texts; first += lengths[text++]) {
        const int64_t own = lengths[text];
        const int64_t which = prompts.numbers ? prompts.rows[text] : 0;
        const int64_t before = prompts.numbers ? prompts.lengths[which] : 0;
        const int64_t seen = before + own, width = whole(seen);
        keys.assign(size * width, 0);
        values.assign(seen * wide, 0);
        logits.resize(QUERIES * width);
        for (int64_t head = 0; head < heads; ++head) {
            for (int64_t j = 0; j < seen; ++j) {
                const T *key, *value;
                if (j < before) {
                    key = prompts.key(which, head, j);
                    value = key + prompts.kind;
                } else {
                    key = inward + (first + j - before) * 3 * across + across + head * size;
                    value = key + across;
                }
                for (int64_t d = 0; d < size; ++d) keys[d * width + j] = widened(key[d]);
                for (int64_t d = 0; d < size; ++d) values[j * wide + d] = widened(value[d]);
            }
            for (int64_t row = 0; row < own; row += QUERIES) {
                const int64_t count = own - row < QUERIES ? own - row : QUERIES;
                for (int q = 0; q < QUERIES; ++q) {  // the last token fills the remaining rows
                    const int64_t token = first + row + (q < count ? q : count - 1);
                    const T* query = inward + token * 3 * across + head * size;
                    for (int64_t d = 0; d < size; ++d) queries[q * wide + d] = widened(query[d]);
                }
                product(queries.data(), wide, keys.data(), size, width, logits.data());
                float by[QUERIES];
                for (int q = 0; q < QUERIES; ++q) by[q] = 1 / softmax(&logits[q * width], seen, width, scale);
                product(logits.data(), width, values.data(), seen, wide, queries.data());
                for (int q = 0; q < count; ++q) {
                    T* to = out + (first + row + q) * across + head * size;
                    for (int64_t d = 0; d < size; ++d) narrow(queries[q * wide + d] * by[q], to + d);
                }
            }
        }
    }
}

#ifdef TILES

constexpr int64_t TILE = 16;  // rows of a tile; a row has 16 pairs of bfloat16, or 16 float32

// Returns whether the system allows this process to use tiles; a process has to request it once.
bool tiles_allowed() {
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    static const bool allowed = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return allowed;
}

// Configures all tiles with their full size, and restores the thread's configuration, which other libraries may use.
class Tiles {
    struct alignas(64) Shapes {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } before;

public:
    Tiles() {
        const Shapes full;
        // GCC assumes that the next two calls access 8 bytes only, and would remove the stores to the other bytes.
        asm volatile("" : : "r"(&full), "r"(&before) : "memory");
        _tile_storeconfig(&before);
        _tile_loadconfig(&full);
    }
    ~Tiles() {
        asm volatile("" : : "r"(&before) : "memory");
        _tile_loadconfig(&before);
    }
    Tiles(const Tiles&) = delete;
};

// Writes the tile [pairs of numbers, keys] of 16 keys, whose addresses are `rows`: 32 numbers of each, from `d` on.
void transpose(const uint16_t* const* rows, int64_t d, uint32_t* to) {
    Ints lines[TILE];
    for (int n = 0; n < TILE; ++n) std::memcpy(&lines[n], rows[n] + d, sizeof lines[n]);
#pragma GCC unroll 4
    for (int step = 8; step > 0; step /= 2) {  // swaps blocks of `step` across the diagonal
        const Ints upper = (LANE & step) == 0 ? LANE : LANE - step + 16;
        const Ints lower = (LANE & step) == 0 ? LANE + step : LANE + 16;
#pragma GCC unroll 16
        for (int n = 0; n < TILE; ++n) {
            if (n & step) continue;
            const Ints above = lines[n], below = lines[n + step];
            lines[n] = __builtin_shuffle(above, below, upper);
            lines[n + step] = __builtin_shuffle(above, below, lower);
        }
    }
    std::memcpy(to, lines, sizeof lines);
}

// attend() for bfloat16 if `size` is a multiple of 32. Weights are rounded to bfloat16 before they multiply values.
void attend_in_tiles(
    const uint16_t* inward, int64_t texts, const int64_t* lengths, int64_t heads, int64_t size,
    Prompts<uint16_t> prompts, uint16_t* out
) {
    const Tiles tiles;
    const int64_t across = heads * size;
    const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(size));
    // Tiles: of keys [width / 16, size / 32], each [pairs of numbers, keys]; of values [width / 32, size / 16], each
    // [pairs of values, numbers].
    Buffer<uint32_t> keys, values;
    Buffer<float> logits, sums(TILE * size);
    Buffer<uint16_t> weights, last(TILE * size);
    const Buffer<uint16_t> nothing(size);
    std::vector<const uint16_t*> rows;
    for (int64_t text = 0, first = 0; text < texts; first += lengths[text++]) {
        const int64_t own = lengths[text];
        const int64_t which = prompts.numbers ? prompts.rows[text] : 0;
        const int64_t before = prompts.numbers ? prompts.lengths[which] : 0;
        const int64_t seen = before + own, width = (seen + 2 * TILE - 1) / (2 * TILE) * (2 * TILE);
        keys.resize(width * size / 2);
        values.resize(width * size / 2);
        logits.resize(TILE * width);
        weights.resize(TILE * width);
        rows.assign(2 * width, nothing.data());  // addresses of keys, then of values
        for (int64_t head = 0; head < heads; ++head) {
            for (int64_t j = 0; j < seen; ++j) {
                const uint16_t* own_key = inward + (first + j - before) * 3 * across + across + head * size;
                rows[j] = j < before ? prompts.key(which, head, j) : own_key;
                rows[width + j] = j < before ? rows[j] + prompts.kind : own_key + across;
            }
            for (int64_t j = 0; j < width; j += TILE)
                for (int64_t d = 0; d < size; d += 2 * TILE) transpose(&rows[j], d, &keys[(j * size + d * TILE) / 2]);
            uint32_t* to = values.data();
            for (int64_t j = 0; j < width; j += 2 * TILE)
                for (int64_t d = 0; d < size; d += TILE)
                    for (int64_t n = 0; n < 2 * TILE; n += 2) {
                        const uint16_t *even = rows[width + j + n] + d, *odd = rows[width + j + n + 1] + d;
                        for (int64_t i = 0; i < TILE; ++i) *to++ = even[i] | static_cast<uint32_t>(odd[i]) << 16;
                    }
            for (int64_t row = 0; row < own; row += TILE) {
                const int64_t count = own - row < TILE ? own - row : TILE;
                const uint16_t* queries = inward + (first + row) * 3 * across + head * size;
                int64_t stride = 3 * across;
                if (count < TILE) {  // the rows after the last token may lie outside the tensor
                    for (int64_t q = 0; q < count; ++q)
                        std::memcpy(&last[q * size], queries + q * stride, size * sizeof *queries);
                    queries = last.data();
                    stride = size;
                }
                for (int64_t j = 0; j < width; j += 2 * TILE) {
                    const uint32_t* key = &keys[j * size / 2];
                    _tile_zero(0);
                    _tile_zero(1);
                    for (int64_t d = 0; d < size; d += 2 * TILE, key += TILE * TILE) {
                        _tile_loadd(2, queries + d, stride * 2);
                        _tile_loadd(3, key, 64);
                        _tile_loadd(4, key + TILE * size / 2, 64);
                        _tile_dpbf16ps(0, 2, 3);
                        _tile_dpbf16ps(1, 2, 4);
                    }
                    _tile_stored(0, &logits[j], width * 4);
                    _tile_stored(1, &logits[j + TILE], width * 4);
                }
                float by[TILE];
                for (int64_t q = 0; q < count; ++q) {
                    float* found = &logits[q * width];
                    by[q] = 1 / softmax(found, seen, whole(seen), scale);
                    for (int64_t j = 0; j < width; j += LANES)
                        narrow(j < seen ? load(found + j) : Floats{}, &weights[q * width + j]);
                }
                for (int64_t d = 0; d < size; d += 2 * TILE) {
                    const uint32_t* value = &values[d * TILE];
                    _tile_zero(0);
                    _tile_zero(1);
                    for (int64_t j = 0; j < width; j += 2 * TILE, value += TILE * size) {
                        _tile_loadd(2, &weights[j], width * 2);
                        _tile_loadd(3, value, 64);
                        _tile_loadd(4, value + TILE * TILE, 64);
                        _tile_dpbf16ps(0, 2, 3);
                        _tile_dpbf16ps(1, 2, 4);
                    }
                    _tile_stored(0, &sums[d], size * 4);
                    _tile_stored(1, &sums[d + TILE], size * 4);
                }
                for (int64_t q = 0; q < count; ++q)
                    for (int64_t d = 0; d < size; d += LANES)
                        narrow(load(&sums[q * size + d]) * by[q], out + (first + row + q) * across + head * size + d);
            }
        }
    }
}

#endif

}  // namespace

// Returns whether attention in bfloat16 uses tiles, for heads whose width is a multiple of 32.
extern "C" int riptide_tiles() {
#ifdef TILES
    return tiles_allowed();
#else
    return 0;
#endif
}

// Computes attention over a packed batch.
//
// inward: queries, keys and values, [tokens, 3, heads, size]. half: whether numbers are bfloat16, else float32.
// lengths: tokens of each text. prompts: null, or keys and values with the strides kind, prompt, head and column.
// rows: the prompt of each text. prompt_lengths: columns of each prompt. out: [tokens, heads, size].
extern "C" void riptide_attend(
    const void* inward, int half, int64_t texts, const int64_t* lengths, int64_t heads, int64_t size,
    const void* prompts, int64_t kind, int64_t prompt, int64_t head, int64_t column, const int64_t* rows,
    const int64_t* prompt_lengths, void* out
) {
    if (half) {
        using Half = uint16_t;
        const Prompts<Half> found{static_cast<const Half*>(prompts), kind, prompt, head, column, rows, prompt_lengths};
#ifdef TILES
        if (size % (2 * TILE) == 0 && tiles_allowed())
            return attend_in_tiles(
                static_cast<const Half*>(inward), texts, lengths, heads, size, found, static_cast<Half*>(out)
            );
#endif
        attend(static_cast<const Half*>(inward), texts, lengths, heads, size, found, static_cast<Half*>(out));
    } else {
        const Prompts<float> found{
            static_cast<const float*>(prompts), kind, prompt, head, column, rows, prompt_lengths
        };
        attend(static_cast<const float*>(inward), texts, lengths, heads, size, found, static_cast<float*>(out));
    }
}

// Writes the layer norm of values + added to values; both are [count, width], width a multiple of 16. half: as above.
extern "C" void riptide_add_and_normalize(
    void* values, const void* added, int half, int64_t count, int64_t width, const void* weight, const void* bias,
    float epsilon
) {
    const auto run = [&]<class T>(T* to) {
        add_and_normalize(
            to, static_cast<const T*>(added), count, width, static_cast<const T*>(weight), static_cast<const T*>(bias),
            epsilon
        );
    };
    half ? run(static_cast<uint16_t*>(values)) : run(static_cast<float*>(values));
}
