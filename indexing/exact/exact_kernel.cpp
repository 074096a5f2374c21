// Exact top-k inner products: products in low precision, compared with running thresholds while they are still in the
// nearest cache, and the survivors scored again in float64. Called through the plain C interface at the end.
//
// What makes the result exact: every product s of rounded vectors comes with a bound E on its distance from the true score,
//     E = a |p| + b |p - p'| + tiny,    a = |q - q'| + (sums + 32) 2^-23 |q|,    b = |q'|,
// where q', p' are the rounded copies (Cauchy-Schwarz; the second part of a covers the additions in float32, of which there
// are none or dim, and the rounding of scores and thresholds). If k passages have true scores of at least T, a passage with
// s + E < T is not among the top k. T only rises, so passages may come in any order and be divided among threads in any way:
// the result stays the same. Products only decide which passages are dropped, so the result is the same on every CPU.
//
// The rounded copies have 16 bits per value (passages.h). For a few queries, converted passages also have copies of 8 bits
// with another bound (bytes.h).
//
// Shapes: queries and passages are handled in tiles of 16 and groups of 32, dimensions in steps of 32, all zero-padded.
// A block is 32 passages x 32 queries: four tiles.

#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>
#include <barrier>
#include <optional>
#include <thread>
#include <utility>

#include "bytes.h"

namespace {

constexpr int PANELS = 8;            // converted between two barriers
constexpr int WARM_ROWS_PER_K = 24;  // size of the sample for the first thresholds; more costs what it saves

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
    std::vector<Bytes> bytes;  // of each panel; none where they are of no use
    int64_t bad = -1;          // the first row that has no finite norm of at most 1e15

    Converted(const Part& of, int64_t num_rows, const int64_t* deleted, int64_t num_deleted)
        : part(of), live(live_rows(num_rows, deleted, num_deleted)) {
        const int64_t steps = (part.dim + STEP - 1) / STEP, most = panel_rows_of(steps);
        for (int64_t start = 0; start < static_cast<int64_t>(live.size()) && bad < 0; start += most) {
            const int64_t rows = std::min(most, static_cast<int64_t>(live.size()) - start);
            Panel& panel = panels.emplace_back();
            panel.reserve((rows + GROUP - 1) / GROUP * GROUP, steps);
            bad = panel.convert(part, live.data() + start, rows, steps);
            if (bad < 0 && FEW_BYTES > 0 && part.dim <= MAX_BYTE_DIM) bytes.emplace_back(part, panel, steps);
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

// With at most this many queries, the products of the padding take longer than the sums over registers do.
constexpr int64_t FEW = 12;

// The same for a few queries, [query][steps * STEP]: each register holds values of one query or passage. The columns of the
// padding stay as they are.
inline void multiply_few(const Value* passages, const float* passage_scales, const Value* queries, int64_t num_queries,
                         const float* query_scales, int64_t steps, Block& out) {
    for (int first = 0; first < GROUP; first += PASSAGES)
        for (int64_t query = 0; query < num_queries; query++) {
            const Value* p = passages + first / TILE * TILE_VALUES + first % TILE * STEP;
            const Value* q = queries + query * steps * STEP;
            Sums sums[PASSAGES] = {};
            for (int64_t s = 0; s < steps; s++, p += 2 * TILE_VALUES, q += STEP)
                for (int j = 0; j < STEP; j += 2 * WIDTH) {
                    const Ints right = load<Ints>(q + j);
#pragma GCC unroll 8
                    for (int i = 0; i < PASSAGES; i++) sums[i] = dot(sums[i], load<Ints>(p + i * STEP + j), right);
                }
#pragma GCC unroll 8
            for (int i = 0; i < PASSAGES; i++) {
                float product = static_cast<float>(joined(sums[i], plus));
                if (EXACT_SUMS) product *= passage_scales[first + i] * query_scales[query];
                out.tile[first / TILE][query / TILE][first % TILE + i][query % TILE] = product;
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
        tiny_ = allocate<float>(padded);
        integer_scale_ = allocate<float>(padded);
        scale_.resize(num_queries);
        if (num_queries <= FEW && !amx) {
            few_ = allocate<Value>(num_queries * steps_ * STEP);
            std::fill_n(few_.get(), num_queries * steps_ * STEP, Value{0});
        }
        // Padding never passes a threshold of +inf.
        std::fill_n(threshold_.get(), padded, std::numeric_limits<float>::infinity());
        std::fill_n(threshold_.get(), num_queries, -std::numeric_limits<float>::infinity());
        std::fill_n(per_norm_.get(), padded, 0.0f);
        std::fill_n(per_rounding_.get(), padded, 0.0f);
        std::fill_n(integer_scale_.get(), padded, 0.0f);
        std::fill_n(tiny_.get(), padded, 0.0f);
        for (int64_t q = 0; q < num_queries; q++) pack(q);
        if (num_queries <= (amx ? FEW_BYTES_AMX : FEW_BYTES)) {
            byte_queries_.emplace(num_queries, steps_);
            for (int64_t q = 0; q < num_queries; q++) byte_queries_->round(q, queries + q * dim, dim, scale_[q]);
        }
        lower_ = allocate<float>(padded * capacity_);
        upper_ = allocate<float>(padded * capacity_);
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
        if (warm_start(part, live)) return bad_row_;
        return scan(part, live) ? bad_row_ : -1;
    }

    // The same of what was converted before.
    int64_t add(const Converted& converted) {
        if (converted.bad >= 0) return converted.bad;
        const bool few = byte_queries_ && !converted.bytes.empty();
        // A few queries need no first thresholds: the candidates until there are some take less time than a sample.
        if (!few && warm_start(converted.part, converted.live)) return bad_row_;
        const int64_t per_item = groups_per_item();
        std::atomic<int64_t> next_item{0}, next_settled{0};
        std::barrier barrier(threads_);
        run([&](int thread) {
            Scratch scratch;
            scratch.query = allocate<double>(steps_ * STEP);
            if (!few)
                collect_all(converted.part, converted.panels, next_item, per_item, scratch);
            else if (thread == 0)
                collect_few(converted, scratch);
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
        tiny_[q] = tiny_of(-exponent);
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
            if (few_) few_[q * steps_ * STEP + i] = copy;
            rounded_square += static_cast<double>(value) * value;
            error += (exact - value) * (exact - value);
        }
        const double slack = static_cast<double>((EXACT_SUMS ? 0 : dim_) + 32) * std::ldexp(1.0, -23);
        per_norm_[q] = static_cast<float>(1.001 * (std::sqrt(error) + slack * std::sqrt(square)));
        per_rounding_[q] = static_cast<float>(1.001 * std::sqrt(rounded_square));
    }

    Floats error_bounds(int64_t q, const Norms& norms) const {
        return load(per_norm_.get() + q) * norms.vector + (load(per_rounding_.get() + q) * norms.rounding + load(tiny_.get() + q));
    }

    void multiply(const Panel& panel, int64_t passage_group, int64_t query_group, Block& out) const {
        const int64_t stride = steps_ * 2 * TILE_VALUES;
        const Value* passages = panel.values.get() + passage_group * stride;
        const Value* queries = packed_.get() + query_group * stride;
#ifdef __AMX_BF16__
        if (amx_) return multiply_amx(passages, queries, steps_, out);
#endif
        const float* passage_scales = panel.scales.data() + passage_group * GROUP;
        if (few_) return multiply_few(passages, passage_scales, few_.get(), num_queries_, integer_scale_.get(), steps_, out);
        multiply_registers(passages, passage_scales, queries, integer_scale_.get() + query_group * GROUP, steps_, out);
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
            Block block{};
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
        std::barrier barrier(threads_);
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
        Block block{};
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
                            append(q0 + lane, tile[row][lane], error[lane], panel.rows[row0 + row]);
                            full |= is_full(q0 + lane);
                        }
                    }
                }
            }
            if (full)
                for (int64_t q = first; q < first + GROUP; q++)
                    if (is_full(q)) make_room(part, q, scratch);
        }
    }

    // The same of all panels and few queries by 8-bit copies. Where their bounds drop too few passages, exact scores of the
    // others would take more time than products of 16 bits.
    void collect_few(const Converted& converted, Scratch& scratch) {
        for (size_t i = 0; i < converted.panels.size(); i++) {
            const Panel& panel = converted.panels[i];
            if (num_candidates_ > num_byte_scores_ / 8 + 2 * capacity_ * num_queries_) {
                collect(converted.part, panel, 0, scratch);
                continue;
            }
            byte_queries_->use_center(converted.bytes[i].center);
            for (int64_t first = 0; first < panel.count; first += GROUP) {
                int64_t q = 0;
                for (; q + 4 <= num_queries_; q += 4) collect_bytes<4>(converted, i, first, q, scratch);
                for (; q + 2 <= num_queries_; q += 2) collect_bytes<2>(converted, i, first, q, scratch);
                for (; q < num_queries_; q++) collect_bytes<1>(converted, i, first, q, scratch);
            }
            num_byte_scores_ += panel.count * num_queries_;
        }
    }

    // A group of passages and COUNT queries.
    template <int COUNT>
    void collect_bytes(const Converted& converted, size_t panel_number, int64_t first, int64_t first_query, Scratch& scratch) {
        const Panel& panel = converted.panels[panel_number];
        ByteScores<COUNT> scores;
        for (int64_t row = first; row < first + GROUP; row += REGISTERS<COUNT> * WIDTH) {
            score_bytes(converted.bytes[panel_number], row, *byte_queries_, first_query, scores);
            for (int q = 0; q < COUNT; q++)
                for (int r = 0; r < REGISTERS<COUNT>; r++) {
                    const Floats score = scores.score[q][r], error = scores.error[q][r];
                    const int64_t query = first_query + q, at = row + r * WIDTH;
                    uint32_t hits = reaches(score + error, Floats{} + threshold_[query]);
                    if (!hits) continue;
                    if (at + WIDTH > panel.count) hits &= (1u << std::max<int64_t>(panel.count - at, 0)) - 1;
                    num_candidates_ += __builtin_popcount(hits);
                    for (; hits; hits &= hits - 1) {
                        const int lane = __builtin_ctz(hits);
                        append(query, score[lane], error[lane], panel.rows[at + lane]);
                    }
                    if (is_full(query)) make_room(converted.part, query, scratch);
                }
        }
    }

    void append(int64_t q, float product, float error, int32_t row) {
        const int64_t at = q * capacity_ + count_[q]++;
        lower_[at] = product - error;
        upper_[at] = product + error;
        rows_[at] = row;
    }

    // Whether a query may lack room for the candidates of another group.
    bool is_full(int64_t q) const { return count_[q] > capacity_ - GROUP; }

    void make_room(const Part& part, int64_t q, Scratch& scratch) {
        shrink(q, scratch);
        // Bounds too wide to drop any (many equal scores, one enormous norm): exact scores always can.
        if (count_[q] > capacity_ - capacity_ / 8 - GROUP) settle(part, q, scratch);
    }

    // Raises a query's threshold to a score that k passages reach for certain, and drops the candidates below it.
    void shrink(int64_t q, Scratch& scratch) {
        const float* lower = lower_.get() + q * capacity_;
        const int64_t count = count_[q], settled = best_count_[q];
        if (count + settled >= k_) {
            auto& values = scratch.values;
            values.assign(lower, lower + count);
            for (int64_t i = 0; i < settled; i++) values.push_back(std::ldexp(best_scores_[q * k_ + i], scale_[q]));
            threshold_[q] = std::max(threshold_[q], about_kth(values));
        }
        drop_below(q, threshold_[q]);
    }

    // Drops the candidates of a query whose scores are below `cut` for certain.
    void drop_below(int64_t q, float cut) {
        float *lower = lower_.get() + q * capacity_, *upper = upper_.get() + q * capacity_;
        int32_t* rows = rows_.get() + q * capacity_;
        const int64_t count = count_[q];
        int64_t kept = 0;
#if WIDTH == 16
        for (int64_t i = 0; i < count; i += WIDTH) {
            const Floats low = load(lower + i), high = load(upper + i);
            const Ints row = load<Ints>(rows + i);
            const uint32_t valid = count - i >= WIDTH ? 0xffff : (1u << (count - i)) - 1;
            const uint32_t keep = reaches(high, Floats{} + cut) & valid;
            // Compressed in registers, as compressing stores are slow on some CPUs; overwrites only what was read.
            store(lower + kept, _mm512_maskz_compress_ps(keep, (__m512)low));
            store(upper + kept, _mm512_maskz_compress_ps(keep, (__m512)high));
            store(rows + kept, _mm512_maskz_compress_epi32(keep, (__m512i)row));
            kept += __builtin_popcount(keep);
        }
#else
        for (int64_t i = 0; i < count; i++) {  // without a branch, which would be hard to predict
            lower[kept] = lower[i];
            rows[kept] = rows[i];
            const float value = upper[kept] = upper[i];
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
        widen(queries_.data() + q * dim_, dim_, steps_ * STEP, scratch.query.get());
        // First those that are among the best k for certain: their scores drop some of the others.
        for (const float least : {threshold_[q], -std::numeric_limits<float>::infinity()}) {
            take(q, least, scratch.rows);
            if (scratch.rows.empty()) continue;
            merge(part, q, scratch);
            drop_below(q, threshold_[q]);
        }
    }

    // Moves the candidates of a query whose scores are at least `least` for certain to `rows`.
    void take(int64_t q, float least, std::vector<int64_t>& rows) {
        const int64_t begin = q * capacity_, end = begin + count_[q];
        int64_t kept = begin;
        rows.clear();
        for (int64_t i = begin; i < end; i++) {
            if (lower_[i] >= least) {
                rows.push_back(rows_[i]);
            } else {
                lower_[kept] = lower_[i];
                upper_[kept] = upper_[i];
                rows_[kept++] = rows_[i];
            }
        }
        count_[q] = static_cast<int32_t>(kept - begin);
    }

    // Scores rows exactly and merges them into a query's best k.
    void merge(const Part& part, int64_t q, Scratch& scratch) {
        const int64_t settled = best_count_[q];
        float* best_scores = best_scores_.data() + q * k_;
        int64_t* best_rows = best_rows_.data() + q * k_;
        auto& rows = scratch.rows;
        auto& scores = scratch.scores;
        scores.resize(rows.size());
        score_rows(part, scratch.query.get(), rows.data(), static_cast<int64_t>(rows.size()), scores.data());
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
        Block block{};
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
    Buffer<Value> few_;                 // [q][dimension] if there are few queries
    std::optional<ByteQueries> byte_queries_;  // if there are few queries
    int64_t num_byte_scores_ = 0, num_candidates_ = 0;   // scores in 8 bits, and those of candidates
    Buffer<float> per_norm_, per_rounding_, threshold_;  // [padded q]; thresholds of scaled scores
    Buffer<float> tiny_;                                 // [padded q]: what error bounds add for underflow
    Buffer<float> integer_scale_;                        // [padded q]: scale of a query's integers
    std::vector<int> scale_;                             // exponents of two: scaled score = score * 2^scale
    Buffer<float> lower_, upper_;                        // [padded q][capacity]: bounds on scaled scores of candidates
    Buffer<int32_t> rows_;                               // [padded q][capacity]: rows of the part
    std::vector<int32_t> count_;
    std::vector<float> best_scores_;  // [q][k]: exact, sorted
    std::vector<int64_t> best_rows_;
    std::vector<int32_t> best_count_;
    std::vector<Panel> panels_;
    int64_t panel_rows_ = 0, bad_row_ = -1;
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
