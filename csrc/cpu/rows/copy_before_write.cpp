// copy_before_write_ and take_unchanged_rows_: rows that a save reads while training goes on.
#include <torch/csrc/stable/library.h>

#include <vector>

#include "arguments/rows.h"
#include "cpu/rows/copy_on_write.h"

namespace dynemb::cpu {
namespace {

// A slab with copy-on-write.
struct CopyOnWriteSlab {
  char* weights;
  int64_t rows;
  int64_t row_bytes;
  SlabState state;

  char* row(int64_t number) const { return weights + number * row_bytes; }
};

CopyOnWriteSlab slab_of(const char* op, const char* name, const Tensor& weights,
                        const std::vector<Tensor>& state,
                        const std::vector<Tensor>& copy_on_write = {}) {
  storage_of(op, name, weights);
  DYNEMB_CHECK(weights.dim() == 2, "dynemb::", op, ": ", name, " has ", weights.dim(),
               " dimensions, expected shape (rows, dim)");
  const int64_t row_bytes = weights.size(1) * static_cast<int64_t>(weights.element_size());
  return {static_cast<char*>(weights.data_ptr()), weights.size(0), row_bytes,
          state_tensors(op, {weights}, state, {}, copy_on_write)[0]};
}

const int64_t* row_numbers(const char* op, const Tensor& rows, int64_t most) {
  check_words(op, "rows", rows);
  const auto* numbers = static_cast<const int64_t*>(rows.data_ptr());
  for (int64_t i = 0; i < rows.numel(); ++i) {
    DYNEMB_CHECK(numbers[i] >= 0 && numbers[i] < most, "dynemb::", op, ": rows[", i, "] is ",
                 numbers[i], ", expected 0 to ", most - 1);
  }
  return numbers;
}

int64_t bytes_of_state(const SlabState& state) {
  int64_t bytes = state.row_states * static_cast<int64_t>(sizeof(float));
  for (int k = 0; k < state.element_states; ++k) bytes += state.row_bytes[k];
  return bytes + (state.steps == nullptr ? 0 : static_cast<int64_t>(sizeof(int32_t)));
}

// Raises unless all fields point into the vector.
void check_copy_on_write(const char* op, const CopyOnWriteSlab& slab) {
  const int64_t* words = slab.state.copy_on_write;
  const int64_t places = words[kCowPlaces];
  DYNEMB_CHECK(words[kCowRows] >= 0 && words[kCowRows] <= slab.rows && places > 0 &&
                   words[kCowRowBytes] >= slab.row_bytes + bytes_of_state(slab.state) &&
                   words[kCowMarks] >= kCowColumns &&
                   words[kCowMarks] + (words[kCowRows] + 1) / 2 <= words[kCowFree] &&
                   words[kCowFree] + (places + 1) / 2 <= words[kCowBuffer] &&
                   words[kCowBuffer] + (places * words[kCowRowBytes] + 7) / 8 <=
                       slab.state.copy_on_write_words,
               "dynemb::", op, ": copy_on_write names ", words[kCowRows], " rows and ", places,
               " places of ", words[kCowRowBytes], " bytes, which do not fit ",
               slab.state.copy_on_write_words, " words and ", slab.rows, " rows of ",
               slab.row_bytes + bytes_of_state(slab.state), " bytes");
}

void copy_before_write_(Tensor weights, std::vector<Tensor> state, Tensor copy_on_write,
                        Tensor rows) {
  const char* op = "copy_before_write_";
  const CopyOnWriteSlab slab = slab_of(op, "weights", weights, state, {copy_on_write});
  const int64_t* numbers = row_numbers(op, rows, slab.rows);
  check_copy_on_write(op, slab);
  for (int64_t i = 0; i < rows.numel(); ++i) {
    copy_before_write(slab.state, numbers[i], slab.row(numbers[i]), slab.row_bytes);
  }
}

void take_unchanged_rows_(Tensor weights, std::vector<Tensor> state, Tensor copy_on_write,
                          Tensor rows, Tensor out_weights, std::vector<Tensor> out_state) {
  const char* op = "take_unchanged_rows_";
  const CopyOnWriteSlab slab = slab_of(op, "weights", weights, state, {copy_on_write});
  check_defined(op, "out_weights", out_weights);
  DYNEMB_CHECK(out_weights.dim() == 2, "dynemb::", op, ": out_weights has ", out_weights.dim(),
               " dimensions, expected shape (rows, dim)");
  for (size_t k = 0; k < out_state.size() && k < state.size(); ++k) {
    check_defined(op, "out_state", out_state[k]);
    check_tensor(op, "out_state", out_state[k], state[k].scalar_type());
    check_size(op, "out_state", out_state[k], 0, out_weights.size(0));
  }
  const CopyOnWriteSlab out = slab_of(op, "out_weights", out_weights, out_state);
  check_copy_on_write(op, slab);
  const int64_t* numbers = row_numbers(op, rows, slab.state.copy_on_write[kCowRows]);
  DYNEMB_CHECK(out.row_bytes == slab.row_bytes &&
                   out.state.element_states == slab.state.element_states &&
                   out.state.row_states == slab.state.row_states &&
                   (out.state.steps == nullptr) == (slab.state.steps == nullptr) &&
                   bytes_of_state(out.state) == bytes_of_state(slab.state),
               "dynemb::", op, ": rows of out_weights and out_state have ", out.row_bytes, " and ",
               bytes_of_state(out.state), " bytes, expected ", slab.row_bytes, " and ",
               bytes_of_state(slab.state), " in as many tensors, as weights and state have");
  DYNEMB_CHECK(out.rows >= rows.numel(), "dynemb::", op, ": out_weights has ", out.rows,
               " rows, expected at least ", rows.numel(), ", as many as rows");
  for (int64_t i = 0; i < rows.numel(); ++i) {
    take_row(slab.state, numbers[i], slab.row(numbers[i]), slab.row_bytes, out.state, i,
             out.row(i));
  }
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("copy_before_write_", TORCH_BOX(&dynemb::cpu::copy_before_write_));
  m.impl("take_unchanged_rows_", TORCH_BOX(&dynemb::cpu::take_unchanged_rows_));
}
