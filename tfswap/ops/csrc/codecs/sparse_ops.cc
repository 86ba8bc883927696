// Tensors with many zeros, as after ReLU and dropout, stored as their nonzero values and the places of these (Gist's
// "Sparse Storage and Dense Compute", Jain et al., ISCA 2018).
//
// A zero is a value whose bits are all zero. So -0 and NaN are stored, and the codec is lossless. As in Gist, a tensor
// is divided into rows of 256 values, so that a column takes one byte.
//
// The number of nonzero values is known only when the step runs, but the plan needs the size of the encoding. So the
// encoded tensor has the size for the planned number of values. Further values are stored in host memory, which the
// second output owns, like a swapped tensor. Denser data than planned makes the step slower, and never increases its
// peak.
//
// Not handled: GPUs, where the count would have to wait for the stream; tensors of 2^32 values or more.

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
// The rows of one piece of work, for which a thread's stack and cache have room.
constexpr int64_t kRowsPerPiece = 8;

// The layout of an encoded tensor: for each row the number of values before it, and after the last row their total;
// then the values; then their columns.
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
The nonzero values of `tensor` and their places.

encoded: Its size depends on the number of values and on `capacity` alone.
spill: Owns the values beyond `capacity`, in host memory. The op fails with
  ResourceExhausted if host memory is at its limit.
capacity: The number of nonzero values that `encoded` has room for.
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

// The values beyond the capacity, then their columns.
struct Spill : ProcessLocal {
  static constexpr char kMaker[] = "EncodeSparse";
  std::shared_ptr<const HostBuffer> host;
  int64_t total = 0;  // the nonzero values of the tensor
  int64_t count = 0;  // those of them in `host`
  size_t value_bytes = 0;
  std::string TypeName() const { return "tfswap::Spill"; }
};

// A list of values and columns, of which the first part is in the encoded tensor and the rest in host memory.
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

  // Calls part(values, columns, offset, count) for each contiguous run of the entries [begin, end), `offset` entries
  // after `begin`.
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

// The attributes of both kernels.
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

// Writes the nonzero values of a row and their columns. Both outputs have room for a full row.
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

// Writes the nonzero values of the rows [row, end) and their columns to `entries`, at the begin of each row.
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
  // First into buffers, without a branch per value: the code writes beyond a row's values, where another thread may be
  // writing the next row.
  Word values[kRowsPerPiece * kRow];
  uint8_t columns[kRowsPerPiece * kRow];
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

// A word has the bits of a value: values are only moved.
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
    RunOnThreads(ctx, codec::CeilDiv(layout.rows, kRowsPerPiece), kRowsPerPiece * kCyclesPerRow,
                 [from, count, begins, entries, rows = layout.rows](int64_t piece) {
                   CompressRows(from, count, piece * kRowsPerPiece,
                                codec::Min((piece + 1) * kRowsPerPiece, rows), begins, entries);
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
    // The outputs of one EncodeSparse have rows in order that end with the total, and in each row nonzero values in
    // ascending columns. All else is refused.
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
