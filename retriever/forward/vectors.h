// float32 and bfloat16 in registers, and the layer norm: shared by the kernels of this folder.
//
// The order of summation does not depend on the width of the registers: sums have 16 lanes, in as many registers as
// these need.

#pragma once

#include <new>
#include <utility>
#include <vector>

#include "registers.h"

namespace {

constexpr int64_t LANES = 16;

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

Floats widened(const uint16_t* from) {  // bfloat16: the upper half of a float32
    return same_bits<Floats>(__builtin_convertvector(load<Halves>(from), Words) << 16);
}

float widened(float value) { return value; }

float widened(uint16_t value) {
    return same_bits<float>(static_cast<uint32_t>(value) << 16);
}

void narrow(Floats values, float* to) { store(to, values); }

void narrow(float value, float* to) { *to = value; }

void narrow(float value, uint16_t* to) {  // to the nearest, ties to even
    const auto bits = same_bits<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    *to = value == value ? static_cast<uint16_t>(rounded) : 0x7fc0;
}

void narrow(Floats values, uint16_t* to) {
    const auto bits = same_bits<Words>(values);
    const Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    store(to, __builtin_convertvector(values == values ? rounded : Words{} + 0x7fc0, Halves));
}

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
