// Registers of numbers in the vector types of the compiler, in the width of this CPU: shared by all kernels.

#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <cstdint>
#include <cstring>

namespace {

// WIDTH: numbers of a register.
#if defined(__AVX512BW__)
#define WIDTH 16
#elif defined(__AVX2__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
constexpr int PARTS = 16 / WIDTH;  // registers of 16 numbers

typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));
typedef double Doubles __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));
typedef uint8_t Octets __attribute__((vector_size(WIDTH)));

constexpr float ROUNDS = 12582912.0f;  // 3 * 2^22: adding it rounds a number to an integer

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

inline Floats widened(const float* from) { return load(from); }

}  // namespace
