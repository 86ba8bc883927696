// Tensors with many zeros as their other values and where these stand (Gist's "Sparse
// Storage and Dense Compute", Jain et al., ISCA 2018): after ReLU and dropout.
//
// A zero is a value whose bits are all zero, so that -0 and NaN come back as they were: the
// codec is lossless. As in Gist, a tensor is cut into rows of 256 values, so that a column
// takes one byte.
//
// How many values are not zero is known only when the step runs; how much memory the
// encoding takes must be known before. So the encoded tensor always has the size of the
// planned number of values, and those beyond it go to host memory, which the second output
// holds, as a swapped tensor would. Denser data than planned makes the step slower, never
// larger.
//
// Not handled: GPUs (their count would have to be waited for), tensors of 2^32 values or
// more.

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "codec_kernel.h"
#include "host_pool.h"
#include "op_support.h"
#include "runtime.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/types.h"
#include "vectors.h"

namespace tfswap {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

constexpr int64_t kRow = 256;
constexpr int64_t kCyclesPerRow = 4 * kRow;
// Rows that one thread compresses next to each other, as many as its stack and its cache have room for.
constexpr int64_t kRowsAtOnce = 8;

// Where things lie in an encoded tensor: for each row the number of values before it (and
// their total behind the last row), then the values, then their columns.
struct Layout {
  Layout(int64_t count, int64_t planned, int64_t value_bytes)
      : rows(codec::CeilDiv(count, kRow)),
        capacity(codec::Min(planned, count)),
        values_begin(codec::CeilDiv(4 * (rows + 1), 16) * 16),
        columns_begin(values_begin + capacity * value_bytes),
        bytes(columns_begin + capacity) {}

  int64_t rows;
  int64_t capacity;
  int64_t values_begin;
  int64_t columns_begin;
  int64_t bytes;
};

template <typename Source>
absl::Status ReadCapacity(Source* source, int64_t* capacity) {
  TF_RETURN_IF_ERROR(source->GetAttr("capacity", capacity));
  if (*capacity >= 0 && *capacity <= UINT32_MAX) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "capacity must be a number of values, which are counted in 32 bits; got ", *capacity, "."));
}

absl::Status EncodeShape(InferenceContext* c) {
  int64_t capacity;
  tensorflow::DataType type;
  TF_RETURN_IF_ERROR(ReadCapacity(c, &capacity));
  TF_RETURN_IF_ERROR(c->GetAttr("T", &type));
  const DimensionHandle count = c->NumElements(c->input(0));
  c->set_output(0, c->Vector(c->ValueKnown(count)
                                 ? Layout(c->Value(count), capacity,
                                          tensorflow::DataTypeSize(type))
                                       .bytes
                                 : InferenceContext::kUnknownDim));
  c->set_output(1, c->Scalar());
  return absl::OkStatus();
}

REGISTER_OP("Tfswap>EncodeSparse")
    .Input("tensor: T")
    .Output("encoded: uint8")
    .Output("spill: variant")
    .Attr("capacity: int")
    .Attr("T: {half, bfloat16, float, double}")
    .SetIsStateful()
    .SetShapeFn(EncodeShape)
    .Doc(R"doc(
The values of `tensor` that are not zero, and where they stand.

encoded: Its size depends on the number of values and on `capacity` alone.
spill: Holds, in host memory, what did not fit. Fails with ResourceExhausted when
  that is at its limit.
capacity: How many values that are not zero `encoded` has room for.
)doc");

REGISTER_OP("Tfswap>DecodeSparse")
    .Input("encoded: uint8")
    .Input("spill: variant")
    .Input("shape: Tshape")
    .Output("tensor: T")
    .Attr("capacity: int")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("Tshape: {int32, int64} = DT_INT32")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 0, &unused));
      return ShapeFromTensor(c, 2);
    })
    .Doc(R"doc(
Undoes EncodeSparse with the same `capacity`. May run any number of times.
)doc");

// What did not fit: the values, then their columns.
struct Spill : ProcessLocal {
  static constexpr char kMaker[] = "EncodeSparse";
  std::shared_ptr<const HostBuffer> host;
  int64_t total = 0;  // values that are not zero, with those that did fit
  int64_t count = 0;
  size_t value_bytes = 0;
  std::string TypeName() const { return "tfswap::Spill"; }
};

// A list of values and columns whose first part lies in the encoded tensor and whose
// rest lies in host memory.
template <typename Word>
class Entries {
 public:
  Entries(uint8_t* encoded, const Layout& layout, void* spill, int64_t spilled)
      : parts_{{reinterpret_cast<Word*>(encoded + layout.values_begin),
                encoded + layout.columns_begin},
               {static_cast<Word*>(spill),
                static_cast<uint8_t*>(spill) + spilled * sizeof(Word)}},
        capacity_(layout.capacity) {}

  bool InOnePart(int64_t begin, int64_t end) const {
    return end <= capacity_ || begin >= capacity_;
  }

  // Calls part(values, columns, offset, count) for each run of entries [begin, end) that lies
  // in one piece, `offset` from `begin`.
  template <typename Part>
  void ForEachPart(int64_t begin, int64_t end, Part part) const {
    const int64_t split = codec::Min(codec::Max(begin, capacity_), end);
    if (begin < split) {
      part(parts_[0].values + begin, parts_[0].columns + begin, int64_t{0}, split - begin);
    }
    if (split < end) {
      const int64_t at = split - capacity_;
      part(parts_[1].values + at, parts_[1].columns + at, split - begin, end - split);
    }
  }

 private:
  struct Part {
    Word* values;
    uint8_t* columns;
  };
  Part parts_[2];
  int64_t capacity_;
};

// What both kernels read at construction.
class SparseOp : public OpKernel {
 public:
  explicit SparseOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadCapacity(ctx, &capacity_));
  }

 protected:
  int64_t capacity_;
};

template <typename Word>
uint32_t CountPresent(const Word* row, int64_t length) {
#ifdef __x86_64__
  if constexpr (std::is_same_v<Word, uint32_t>) {
    if (length == kRow && HasAvx512()) return avx512::CountPresent(row, kRow);
    if (length == kRow && HasAvx2()) return avx2::CountPresent(row, kRow);
  }
#endif
  uint32_t present = 0;
  for (int64_t k = 0; k < length; ++k) present += row[k] != 0;
  return present;
}

// The values of a row that are not zero, and their columns; both have room for all of a row.
template <typename Word>
void CompressRow(const Word* row, int64_t length, Word* values, uint8_t* columns) {
#ifdef __x86_64__
  if constexpr (std::is_same_v<Word, uint32_t>) {
    if (length == kRow && HasAvx2()) return avx2::Compress(row, kRow, values, columns);
  }
#endif
  int found = 0;
  for (int k = 0; k < length; ++k) {
    values[found] = row[k];
    columns[found] = static_cast<uint8_t>(k);
    found += row[k] != 0;
  }
}

// The values of rows [row, end) that are not zero, and their columns, in `entries` from where each row begins.
template <typename Word>
void CompressRows(const Word* from, int64_t count, int64_t row, int64_t end, const uint32_t* begins,
                  const Entries<Word>& entries) {
#ifdef __x86_64__
  if constexpr (std::is_same_v<Word, uint32_t>) {
    if (end * kRow <= count && entries.InOnePart(begins[row], begins[end]) && HasAvx512()) {
      for (; row < end; ++row) {
        entries.ForEachPart(begins[row], begins[row + 1],
                            [from, row](uint32_t* values, uint8_t* columns, int64_t, int64_t) {
                              avx512::Compress(from + row * kRow, kRow, values, columns);
                            });
      }
      return;
    }
  }
#endif
  // First next to each other, without a branch per value: rows are neighbours in the output, and
  // another thread may be writing the next ones.
  Word values[kRowsAtOnce * kRow];
  uint8_t columns[kRowsAtOnce * kRow];
  const int64_t begin = begins[row];
  for (; row < end; ++row) {
    CompressRow(from + row * kRow, codec::Min(kRow, count - row * kRow), values + (begins[row] - begin),
                   columns + (begins[row] - begin));
  }
  entries.ForEachPart(begin, begins[end],
                      [&](Word* to, uint8_t* to_columns, int64_t offset, int64_t n) {
                        std::memcpy(to, values + offset, n * sizeof(Word));
                        std::memcpy(to_columns, columns + offset, n);
                      });
}

// A word stands for a value's bits: values are moved, never computed with.
template <typename Word>
class EncodeSparseOp : public SparseOp {
 public:
  using SparseOp::SparseOp;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& tensor = ctx->input(0);
    const int64_t count = tensor.NumElements();
    OP_REQUIRES(ctx, count <= UINT32_MAX,
                absl::InvalidArgumentError(absl::StrCat(
                    "EncodeSparse node '", name(), "' got ", count,
                    " values; it counts them in 32 bits.")));
    const Layout layout(count, capacity_, sizeof(Word));
    Tensor* output = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({layout.bytes}), &output));
    auto* const encoded = MutableElements<uint8_t>(output);
    auto* const begins = reinterpret_cast<uint32_t*>(encoded);
    const auto* const from = static_cast<const Word*>(tensor.data());

    RunOnThreads(ctx, layout.rows, kRow, [from, count, begins](int64_t row) {
      begins[row + 1] =
          CountPresent(from + row * kRow, codec::Min(kRow, count - row * kRow));
    });
    begins[0] = 0;
    for (int64_t row = 0; row < layout.rows; ++row) begins[row + 1] += begins[row];

    Spill spill;
    spill.value_bytes = sizeof(Word);
    spill.total = begins[layout.rows];
    spill.count = codec::Max(spill.total - layout.capacity, 0);
    if (spill.count > 0) {
      const size_t bytes = spill.count * (sizeof(Word) + 1);
      HostPool& pool = Runtime::Get().pool();
      HostPool::Failure failure;
      spill.host = std::make_shared<HostBuffer>(&pool, pool.Allocate(bytes, &failure));
      OP_REQUIRES(ctx, failure == HostPool::Failure::kNone,
                  NoHostMemory(failure, name(), bytes, tensor));
      Runtime::Get().spilled_bytes() += bytes;
    }
    const Entries<Word> entries(encoded, layout, spill.host ? spill.host->data() : nullptr,
                                spill.count);
    RunOnThreads(ctx, codec::CeilDiv(layout.rows, kRowsAtOnce), kRowsAtOnce * kCyclesPerRow,
                 [from, count, begins, entries, rows = layout.rows](int64_t piece) {
                   CompressRows(from, count, piece * kRowsAtOnce,
                                codec::Min((piece + 1) * kRowsAtOnce, rows), begins, entries);
                 });
    SetVariantOutput(ctx, 1, std::move(spill));
  }
};

template <typename Word>
class DecodeSparseOp : public SparseOp {
 public:
  using SparseOp::SparseOp;

  void Compute(OpKernelContext* ctx) override {
    const Spill* spill;
    OP_REQUIRES_OK(ctx, GetVariantInput(ctx, 1, &spill));
    OP_REQUIRES(ctx, spill->value_bytes == sizeof(Word), NotOfOne());
    const auto layout_of = [&](int64_t values) { return Layout(values, capacity_, sizeof(Word)); };
    Tensor* tensor = nullptr;
    OP_REQUIRES_OK(ctx, AllocateDecoded(
                            ctx, [&](int64_t values) { return layout_of(values).bytes; },
                            &tensor));

    const int64_t count = tensor->NumElements();
    const Layout layout = layout_of(count);
    auto* const encoded = const_cast<uint8_t*>(Elements<uint8_t>(ctx->input(0)));
    const auto* const begins = reinterpret_cast<const uint32_t*>(encoded);
    const int64_t available = layout.capacity + spill->count;
    const Entries<Word> entries(encoded, layout, spill->host ? spill->host->data() : nullptr,
                                spill->count);
    auto* const to = static_cast<Word*>(tensor->data());
    // Only what one EncodeSparse has made is that: rows that follow each other and end with what there is, and in each
    // row values that are not zero, from left to right.
    std::atomic<bool> damaged{begins[0] != 0 || begins[layout.rows] != spill->total};
    RunOnThreads(ctx, layout.rows, kCyclesPerRow, [=, &damaged](int64_t row) {
      Word* const out = to + row * kRow;
      const int64_t length = codec::Min(kRow, count - row * kRow);
      std::memset(out, 0, length * sizeof(Word));
      const int64_t begin = begins[row], end = begins[row + 1];
      if (begin > end || end > available) {
        damaged = true;
        return;
      }
      bool fits = true;
      int left = -1;  // the column of the value before
      entries.ForEachPart(begin, end, [&](const Word* values, const uint8_t* columns, int64_t,
                                          int64_t n) {
        for (int64_t k = 0; k < n; ++k) {
          const int column = columns[k];
          fits &= column > left && column < length && values[k] != 0;
          if (column < length) out[column] = values[k];
          left = column;
        }
      });
      if (!fits) damaged = true;
    });
    OP_REQUIRES(ctx, !damaged, NotOfOne());
  }

 private:
  absl::Status NotOfOne() const {
    return absl::InvalidArgumentError(
        absl::StrCat("DecodeSparse node '", name(),
                     "' did not get the two outputs of one EncodeSparse of that type and shape, or their "
                     "bytes have changed since."));
  }
};

#define REGISTER_FOR_TYPE(type, word)                                                        \
  REGISTER_KERNEL_BUILDER(                                                                   \
      Name("Tfswap>EncodeSparse").Device(tensorflow::DEVICE_CPU).TypeConstraint<type>("T"),  \
      EncodeSparseOp<word>);                                                                 \
  REGISTER_KERNEL_BUILDER(                                                                   \
      Name("Tfswap>DecodeSparse").Device(tensorflow::DEVICE_CPU).TypeConstraint<type>("T"),  \
      DecodeSparseOp<word>);

REGISTER_FOR_TYPE(Eigen::half, uint16_t)
REGISTER_FOR_TYPE(tensorflow::bfloat16, uint16_t)
REGISTER_FOR_TYPE(float, uint32_t)
REGISTER_FOR_TYPE(double, uint64_t)
#undef REGISTER_FOR_TYPE

}  // namespace
}  // namespace tfswap
