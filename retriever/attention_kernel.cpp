// Attention over texts that stand end to end, for one thread. torch's takes rows padded to the longest text, and for texts of
// a dozen tokens most of its time goes into setting out. Here a text and a head at a time is widened to float32, keys
// transposed, and stays in the nearest cache.
//
// Numbers are summed in an order that no width of registers changes: 16 lanes everywhere, one after the other within each.

#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr int64_t LANES = 16;
constexpr int QUERIES = 8;  // tokens that look together, so that a key is read once for them

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));

int64_t whole(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

Floats load(const float* from) {
    Floats found;
    std::memcpy(&found, from, sizeof found);
    return found;
}

void store(float* to, Floats values) { std::memcpy(to, &values, sizeof values); }

float widened(float value) { return value; }

float widened(uint16_t value) {  // bfloat16: the upper half of a float32
    const uint32_t bits = static_cast<uint32_t>(value) << 16;
    float found;
    std::memcpy(&found, &bits, sizeof found);
    return found;
}

void narrow(float value, float* to) { *to = value; }

void narrow(float value, uint16_t* to) {  // to the nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    *to = value == value ? static_cast<uint16_t>(rounded) : 0x7fc0;
}

constexpr float LEAST = -87;          // e^x is nearly the least number below it
constexpr float ROUNDS = 12582912.0;  // 3 * 2^22, which leaves a whole number when it is added and taken away

// e^x for x <= 0, to 2 units in the last place; 0 below -87.
Floats exponential(Floats x) {
    const Ints gone = x < LEAST;
    x = gone ? Floats{} + LEAST : x;
    const Floats number = (x * 1.44269504f + ROUNDS) - ROUNDS;
    Floats f = x - number * 0.693359375f;
    f = f - number * -2.12194440e-4f;
    Floats p = f * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * f * f + f + 1.0f;
    const Ints power = (__builtin_convertvector(number, Ints) + 127) << 23;
    Floats scale;
    std::memcpy(&scale, &power, sizeof scale);
    return gone ? Floats{} : p * scale;
}

// What `join` makes of all lanes, two by two.
template <class Join>
float joined(Floats values, Join join) {
    const Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (const int step : {8, 4, 2, 1}) values = join(values, __builtin_shuffle(values, lanes ^ step));
    return values[0];
}

// Logits of `width` columns, of which the first `seen` count, to weights; their sum.
float softmax(float* logits, int64_t seen, int64_t width) {
    for (int64_t j = seen; j < width; ++j) logits[j] = std::numeric_limits<float>::lowest();
    Floats most = load(logits);
    for (int64_t j = LANES; j < width; j += LANES) {
        const Floats next = load(logits + j);
        most = next > most ? next : most;
    }
    const float highest = joined(most, [](Floats a, Floats b) { return a > b ? a : b; });
    Floats sums = {};
    for (int64_t j = 0; j < width; j += LANES) {
        Floats weights = exponential(load(logits + j) - highest);
        store(logits + j, weights);
        sums += weights;
    }
    return joined(sums, [](Floats a, Floats b) { return a + b; });
}

// QUERIES rows of `left`, `stride` apart, times `right`, [inner, width]: to `to`, [QUERIES, width].
void product(const float* left, int64_t stride, const float* right, int64_t inner, int64_t width, float* to) {
    for (int64_t j = 0; j < width; j += LANES) {
        Floats sums[QUERIES] = {};
        for (int64_t i = 0; i < inner; ++i) {
            const Floats row = load(right + i * width + j);
#pragma GCC unroll 8
            for (int q = 0; q < QUERIES; ++q) sums[q] += left[q * stride + i] * row;
        }
#pragma GCC unroll 8
        for (int q = 0; q < QUERIES; ++q) store(to + q * width + j, sums[q]);
    }
}

// Row-major pieces of a tensor whose last dimension lies in a piece: strides in numbers.
template <class T>
struct Prompts {
    const T* numbers;  // null: there are none
    int64_t kind, prompt, head, column;  // strides of keys and values, prompts, heads, columns
    const int64_t* rows;                 // of each text, which prompt
    const int64_t* lengths;              // of each prompt
};

template <class T>
void attend(
    const T* inward, int64_t texts, const int64_t* lengths, int64_t heads, int64_t size, Prompts<T> prompts, T* out
) {
    const int64_t across = heads * size, wide = whole(size);
    const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(size));
    std::vector<float> keys, values, logits, queries(QUERIES * wide);
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
                    key = prompts.numbers + which * prompts.prompt + head * prompts.head + j * prompts.column;
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
                for (int q = 0; q < QUERIES; ++q) {  // behind the last one, the last one again
                    const int64_t token = first + row + (q < count ? q : count - 1);
                    const T* query = inward + token * 3 * across + head * size;
                    for (int64_t d = 0; d < size; ++d) queries[q * wide + d] = widened(query[d]) * scale;
                }
                product(queries.data(), wide, keys.data(), size, width, logits.data());
                float by[QUERIES];
                for (int q = 0; q < QUERIES; ++q) by[q] = 1 / softmax(&logits[q * width], seen, width);
                product(logits.data(), width, values.data(), seen, wide, queries.data());
                for (int q = 0; q < count; ++q) {
                    T* to = out + (first + row + q) * across + head * size;
                    for (int64_t d = 0; d < size; ++d) narrow(queries[q * wide + d] * by[q], to + d);
                }
            }
        }
    }
}

}  // namespace

// inward: [tokens, 3, heads, size], queries, keys and values of texts end to end; out: [tokens, heads, size]. half: they are
// bfloat16, else float32. prompts: null, or keys and values by their strides; rows of the texts, lengths of the prompts.
extern "C" void riptide_attend(
    const void* inward, int half, int64_t texts, const int64_t* lengths, int64_t heads, int64_t size, const void* prompts,
    int64_t kind, int64_t prompt, int64_t head, int64_t column, const int64_t* rows, const int64_t* prompt_lengths, void* out
) {
    if (half) {
        using Half = uint16_t;
        const Prompts<Half> found{static_cast<const Half*>(prompts), kind, prompt, head, column, rows, prompt_lengths};
        attend(static_cast<const Half*>(inward), texts, lengths, heads, size, found, static_cast<Half*>(out));
    } else {
        const Prompts<float> found{static_cast<const float*>(prompts), kind, prompt, head, column, rows, prompt_lengths};
        attend(static_cast<const float*>(inward), texts, lengths, heads, size, found, static_cast<float*>(out));
    }
}
