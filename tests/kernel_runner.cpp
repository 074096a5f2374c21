// Runs one of the kernels on random numbers and writes the bytes of its results to stdout: the same program for several
// CPUs, one of which may be emulated. KERNEL is the file of the kernel; EXACT, PACKING or INT8 says which one it is.

#include KERNEL

#include <cstdio>
#include <cstdlib>
#include <random>

namespace {

std::mt19937 generator(7);  // the same numbers on every CPU

// Returns a number in [-1, 1).
float number() { return static_cast<float>(generator() >> 7) * 0x1p-24f - 1.0f; }

std::vector<float> numbers(int64_t count) {
    std::vector<float> found(count);
    for (float& value : found) value = number();
    return found;
}

template <class T>
void write(const std::vector<T>& values) {
    if (std::fwrite(values.data(), sizeof(T), values.size(), stdout) != values.size()) std::abort();
}

#ifdef EXACT

// Normalised and denormalised float16.
std::vector<uint16_t> float16(int64_t count) {
    std::vector<uint16_t> found(count);
    for (auto& bits : found) {
        const uint32_t exponent = generator() % 8;
        bits = static_cast<uint16_t>((generator() & 0x83ff) | (exponent ? exponent + 10 : 0) << 10);
    }
    return found;
}

void run() {
    constexpr int64_t VECTORS = 900, K = 6, CANDIDATES = 50;
    for (const int64_t dim : {5, 83, 128}) {
        for (const auto [num_queries, half] : {std::pair{40, 0}, {40, 1}, {3, 1}}) {
            const auto queries = numbers(num_queries * dim), single = numbers(VECTORS * dim);
            const auto halves = float16(VECTORS * dim);
            const void* vectors = half ? static_cast<const void*>(halves.data()) : single.data();
            std::vector<float> scores(num_queries * K), pair_scores(num_queries * CANDIDATES);
            std::vector<int64_t> rows(num_queries * K), candidates(num_queries * CANDIDATES), deleted{0, 70, 71, VECTORS - 1};
            void* search = riptide_search_new(queries.data(), num_queries, dim, K, 2, 0);
            if (riptide_search_add(search, vectors, half, VECTORS, dim, 0, deleted.data(), deleted.size()) != -1) std::abort();
            riptide_search_result(search, scores.data(), rows.data());
            riptide_search_free(search);
            for (auto& row : candidates) row = static_cast<int64_t>(generator() % (VECTORS + 1)) - 1;
            riptide_score_pairs(
                queries.data(), num_queries, dim, candidates.data(), CANDIDATES, vectors, half, 2, pair_scores.data()
            );
            write(scores);
            write(rows);
            write(pair_scores);
        }
    }
}

#else

// Texts of several lengths, one of which is longer than the keys that share a scale in int8.
const std::vector<int64_t> LENGTHS{1, 2, 7, 16, 33, 600}, PROMPT_LENGTHS{5, 0, 2}, PROMPTS{0, 1, 2, 0, 1, 2};
constexpr int64_t TOKENS = 659, HEADS = 2, COLUMNS_OF_PROMPTS = 5;

#endif

#ifdef PACKING

std::vector<uint16_t> bfloat16(const std::vector<float>& values) {
    std::vector<uint16_t> found(values.size());
    for (size_t i = 0; i < values.size(); ++i) narrow(values[i], &found[i]);
    return found;
}

void run() {
    for (const int64_t size : {20, 32}) {
        const int64_t of_prompt = HEADS * COLUMNS_OF_PROMPTS * size, count = PROMPT_LENGTHS.size();
        const auto inward = numbers(TOKENS * 3 * HEADS * size), prompts = numbers(2 * count * of_prompt);
        const auto attend = [&]<class T>(const std::vector<T>& from, const std::vector<T>& table) {
            std::vector<T> out(TOKENS * HEADS * size);
            riptide_attend(
                from.data(), sizeof(T) == 2, LENGTHS.size(), LENGTHS.data(), HEADS, size, table.data(), count * of_prompt,
                of_prompt, COLUMNS_OF_PROMPTS * size, size, PROMPTS.data(), PROMPT_LENGTHS.data(), out.data()
            );
            write(out);
        };
        attend(inward, prompts);
        attend(bfloat16(inward), bfloat16(prompts));
    }
    const auto normalize = [&]<class T>(std::vector<T> values, const std::vector<T>& added) {
        riptide_add_and_normalize(values.data(), added.data(), sizeof(T) == 2, 50, 48, &added[0], &added[48], 1e-12f);
        write(values);
    };
    const auto values = numbers(50 * 48), added = numbers(50 * 48);
    normalize(values, added);
    normalize(bfloat16(values), bfloat16(added));
}

#endif

#ifdef INT8

struct OwnLinear {
    Buffer<int8_t> weights;
    std::vector<int32_t> sums;
    std::vector<float> scales, bias;
    Linear view;

    OwnLinear(int64_t outer, int64_t inner) : weights(outer * inner), sums(outer), scales(numbers(outer)), bias(numbers(outer)) {
        std::vector<int8_t> plain(outer * inner);
        for (int64_t i = 0; i < outer * inner; ++i) {
            plain[i] = static_cast<int8_t>(static_cast<int32_t>(generator() % 255) - 127);
            sums[i / inner] += plain[i];
        }
        for (float& scale : scales) scale = (scale + 1.5f) / 1000;
        riptide_int8_pack(plain.data(), outer, inner, weights.data());
        view = {weights.data(), sums.data(), scales.data(), bias.data(), inner, outer};
    }
};

void run() {
    constexpr int64_t SIZE = 32, WIDE = HEADS * SIZE;
    const OwnLinear inward(3 * WIDE, WIDE), outward(WIDE, WIDE), widen(3 * WIDE, WIDE), narrow(WIDE, 3 * WIDE);
    auto hidden = numbers(TOKENS * WIDE);
    std::vector<float> attended(TOKENS * WIDE), keys(TOKENS * 3 * WIDE);
    riptide_int8_linear(hidden.data(), TOKENS, &inward.view, keys.data());
    write(keys);
    const int64_t of_prompt = HEADS * COLUMNS_OF_PROMPTS * SIZE, count = PROMPT_LENGTHS.size();
    const auto prompts = numbers(2 * count * of_prompt);
    riptide_int8_attend(
        keys.data(), LENGTHS.size(), LENGTHS.data(), HEADS, SIZE, prompts.data(), count * of_prompt, of_prompt,
        COLUMNS_OF_PROMPTS * SIZE, SIZE, PROMPTS.data(), PROMPT_LENGTHS.data(), attended.data()
    );
    write(attended);
    const auto norms = numbers(4 * WIDE);
    const Layer layer{
        inward.view, outward.view, widen.view, narrow.view,
        {&norms[0], &norms[WIDE], &norms[2 * WIDE], &norms[3 * WIDE]}
    };
    riptide_int8_layers(
        hidden.data(), &layer, 1, 1e-12f, LENGTHS.size(), LENGTHS.data(), HEADS, prompts.data(), count * of_prompt,
        of_prompt, COLUMNS_OF_PROMPTS * SIZE, SIZE, PROMPTS.data(), PROMPT_LENGTHS.data(), 0
    );
    write(hidden);
}

#endif

}  // namespace

int main() { run(); }
