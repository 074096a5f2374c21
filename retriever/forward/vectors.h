// Registers of float32 and bfloat16 in the vector types of the compiler, and the layer norm: shared by the kernels of
// this folder.
//
// The order of summation does not depend on the width of the registers: sums have 16 lanes, in as many registers as
// these need.

#pragma once

#include <cstdint>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

namespace {

constexpr int64_t LANES = 16;

// WIDTH: numbers of a register.
#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
constexpr int PARTS = LANES / WIDTH;

typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));

// Memory that is aligned to cache lines; otherwise every second load takes two lines.
template <class T>
struct Aligned {
    using value_type = T;
    T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t{64})); }
    void deallocate(T* memory, size_t) { ::operator delete(memory, std::align_val_t{64}); }
    bool operator==(const Aligned&) const { return true; }
};

template <class T>
using Buffer = std::vector<T, Aligned<T>>;

template <int... lanes>
constexpr Ints numbered(std::integer_sequence<int, lanes...>) {
    return Ints{lanes...};
}

constexpr Ints LANE = numbered(std::make_integer_sequence<int, WIDTH>());

int64_t whole(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

Floats load(const float* from) {
    Floats found;
    std::memcpy(&found, from, sizeof found);
    return found;
}

void store(float* to, Floats values) { std::memcpy(to, &values, sizeof values); }

Floats widened(const float* from) { return load(from); }

Floats widened(const uint16_t* from) {  // bfloat16: the upper half of a float32
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    const Words words = __builtin_convertvector(halves, Words) << 16;
    Floats found;
    std::memcpy(&found, &words, sizeof found);
    return found;
}

float widened(float value) { return value; }

float widened(uint16_t value) {
    const uint32_t bits = static_cast<uint32_t>(value) << 16;
    float found;
    std::memcpy(&found, &bits, sizeof found);
    return found;
}

void narrow(Floats values, float* to) { store(to, values); }

void narrow(float value, float* to) { *to = value; }

void narrow(float value, uint16_t* to) {  // to the nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    *to = value == value ? static_cast<uint16_t>(rounded) : 0x7fc0;
}

void narrow(Floats values, uint16_t* to) {
    Words bits;
    std::memcpy(&bits, &values, sizeof bits);
    const Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const Halves halves = __builtin_convertvector(values == values ? rounded : Words{} + 0x7fc0, Halves);
    std::memcpy(to, &halves, sizeof halves);
}

constexpr float ROUNDS = 12582912.0;  // 3 * 2^22: adding it rounds a number to an integer

// Reduces the 16 lanes with `join`: pairs of lanes at a distance of 8, then of 4, 2 and 1.
template <class Join>
float joined(Floats (&parts)[PARTS], Join join) {
    for (int half = PARTS / 2; half > 0; half /= 2)
        for (int part = 0; part < half; ++part) parts[part] = join(parts[part], parts[part + half]);
    Floats values = parts[0];
    for (int step = WIDTH / 2; step > 0; step /= 2) values = join(values, __builtin_shuffle(values, LANE ^ step));
    return values[0];
}

// Writes the layer norm of each row of `values` + `added` to `values`.
template <class T>
void add_and_normalize(
    T* values, const T* added, int64_t count, int64_t width, const T* weight, const T* bias, float epsilon
) {
    Buffer<float> sum(width), weights(width), biases(width);
    for (int64_t i = 0; i < width; ++i) weights[i] = widened(weight[i]), biases[i] = widened(bias[i]);
    const auto plus = [](Floats a, Floats b) { return a + b; };
    for (int64_t row = 0; row < count; ++row, values += width, added += width) {
        Floats total[PARTS] = {}, squares[PARTS] = {};
        for (int64_t i = 0; i < width; i += LANES) {
            for (int part = 0; part < PARTS; ++part) {
                const int64_t at = i + part * WIDTH;
                const Floats both = widened(values + at) + widened(added + at);
                total[part] += both;
                store(&sum[at], both);
            }
        }
        const float mean = joined(total, plus) / width;
        for (int64_t i = 0; i < width; i += LANES) {
            for (int part = 0; part < PARTS; ++part) {
                const Floats off = load(&sum[i + part * WIDTH]) - mean;
                squares[part] += off * off;
            }
        }
        const float by = 1 / __builtin_sqrtf(joined(squares, plus) / width + epsilon);
        for (int64_t i = 0; i < width; i += WIDTH) {
            const Floats found = (load(&sum[i]) - mean) * by * load(&weights[i]) + load(&biases[i]);
            narrow(found, values + i);
        }
    }
}

}  // namespace
