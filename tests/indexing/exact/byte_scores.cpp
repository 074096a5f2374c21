// Scores of all passages and queries by their 8-bit copies, and the bounds on them, for tests.

#include "bytes.h"

namespace {

template <int COUNT>
void write_scores(const Bytes& bytes, const Panel& panel, const ByteQueries& queries, int64_t query, float* scores, float* errors) {
    ByteScores<COUNT> found;
    for (int64_t first = 0; first < panel.count; first += REGISTERS<COUNT> * WIDTH) {
        score_bytes(bytes, first, queries, query, found);
        for (int q = 0; q < COUNT; q++)
            for (int i = 0; i < REGISTERS<COUNT> * WIDTH && first + i < panel.count; i++) {
                scores[(query + q) * panel.count + first + i] = found.score[q][i / WIDTH][i % WIDTH];
                errors[(query + q) * panel.count + first + i] = found.error[q][i / WIDTH][i % WIDTH];
            }
    }
}

}  // namespace

// Whether this CPU has instructions for bytes.
extern "C" int byte_scores_exist() { return FEW_BYTES > 0; }

// Writes scores and bounds [num_queries][num_rows] of vectors that fit one panel. The largest magnitude of each query is
// between 1/2 and 1, unless it is zero.
extern "C" void byte_scores(const void* vectors, int half, int64_t num_rows, int64_t dim, const float* queries,
                            int64_t num_queries, float* scores, float* errors) {
    const Part part{static_cast<const char*>(vectors), half != 0, dim, 0};
    const int64_t steps = (dim + STEP - 1) / STEP;
    std::vector<int32_t> rows(num_rows);
    for (int64_t i = 0; i < num_rows; i++) rows[i] = static_cast<int32_t>(i);
    Panel panel;
    panel.reserve((num_rows + GROUP - 1) / GROUP * GROUP, steps);
    if (panel.convert(part, rows.data(), num_rows, steps) >= 0) std::abort();
    const Bytes bytes(part, panel, steps);
    ByteQueries rounded(num_queries, steps);
    for (int64_t q = 0; q < num_queries; q++) rounded.round(q, queries + q * dim, dim, 0);
    rounded.use_center(bytes.center);
    int64_t q = 0;
    for (; q + 4 <= num_queries; q += 4) write_scores<4>(bytes, panel, rounded, q, scores, errors);
    for (; q + 2 <= num_queries; q += 2) write_scores<2>(bytes, panel, rounded, q, scores, errors);
    for (; q < num_queries; q++) write_scores<1>(bytes, panel, rounded, q, scores, errors);
}
