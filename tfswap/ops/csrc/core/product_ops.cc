// Gradients of filters and weights with the bits of TensorFlow's kernels, in bounded memory
// (kernels/contraction_order.py, passes/tactics/slice_kernels.py).
//
//   AddProducts  adds up the products of blocks of rows, in the order of Eigen's contraction
//
// TensorFlow's kernels of filters' gradients lay out the patches of a shard of images, or of a whole volume, as columns
// (conv_grad_filter_ops.cc, conv_grad_ops_3d.cc). Eigen adds up the products of blocks of these, so that one block is
// enough. The products are those of TensorFlow's own kernel of MatMul. On a CPU only.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "lent_products.h"
#include "patches.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/util/work_sharder.h"

namespace tfswap {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("Tfswap>AddProducts")
    .Input("images: T")
    .Input("gradients: T")
    .Input("before: N * T")
    .Output("sum: T")
    .Output("state: T")
    .Attr("T: {float}")
    .Attr("N: int >= 0")
    .Attr("window: list(int) >= 0")
    .Attr("strides: list(int) >= 0")
    .Attr("dilations: list(int) >= 0")
    .Attr("padding: list(int) >= 0")
    .Attr("sizes: list(int) >= 0")
    .Attr("begin: int >= 0")
    .Attr("rows: int >= 1")
    .Attr("shard: list(int)")
    .Attr("last_shard: list(int)")
    .Attr("chunk: int >= 1")
    .Attr("closed: bool")
    .SetShapeFn([](InferenceContext* c) {
      std::vector<int64_t> window;
      TF_RETURN_IF_ERROR(c->GetAttr("window", &window));
      int64_t under = 1;
      for (int64_t size : window) under *= size;
      DimensionHandle width = c->UnknownDim(), made = c->UnknownDim();
      if (c->RankKnown(c->input(0))) TF_RETURN_IF_ERROR(c->Multiply(c->Dim(c->input(0), -1), under, &width));
      if (c->RankKnown(c->input(1))) made = c->Dim(c->input(1), -1);
      c->set_output(0, c->Matrix(width, made));
      c->set_output(1, c->UnknownShapeOfRank(1));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Adds the products of patches of images with gradients to a sum: a filter's gradient. Images have their channels last.
Without a window, images are rows of a matrix.

before: The sum that the slice before has made, and its state unless slices are closed; nothing for the first slice.
state: What the slice after continues: sums of parts, and the rows of a block that is not complete.
begin: The position of the slice's first row among all `rows`.
shard: The rows of a shard, of a part of it, of a block of a part, and of a block of its last part. Blocks are added up
  in a part, parts in a shard, and shards.
last_shard: The same of the last shard.
chunk: How many elements of a patch are multiplied at a time.
closed: Whether slices begin and end where sums do: with shards, or with blocks of the only part. Then there is no state.
)doc");

// How the rows of a shard are added up.
struct Order {
  int64_t rows, part, block, last_block;

  int64_t parts() const { return (rows + part - 1) / part; }
  int64_t most() const { return std::max(block, last_block); }

  static absl::Status Get(OpKernelConstruction* ctx, absl::string_view attr, Order* order) {
    std::vector<int64_t> found;
    TF_RETURN_IF_ERROR(ctx->GetAttr(attr, &found));
    const bool is_valid = found.size() == 4 && std::all_of(found.begin(), found.end(), [](int64_t size) {
      return size > 0 && size <= Patches::kMost;
    });
    if (!is_valid || found[1] > found[0] || found[2] > found[1] || found[3] > found[1]) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", ctx->def().name(), "' has an attribute '", attr, "' that is no order of a sum."));
    }
    *order = {found[0], found[1], found[2], found[3]};
    return absl::OkStatus();
  }
};

// A block of rows: which part of which shard it is in.
struct Block {
  int64_t begin, end;
  int64_t part;
  bool begins_part, ends_shard, is_first_shard;
  int64_t parts;  // of the shard
};

void AddTo(const float* numbers, int64_t count, float* sums) {
  for (int64_t i = 0; i < count; ++i) sums[i] += numbers[i];
}

// Adds three sums to the first one. Elements in packets are added in another order than those that are left over.
void AddThree(float* sum, const float* second, const float* third, const float* fourth, int64_t packets,
              int64_t count) {
  for (int64_t i = 0; i < packets; ++i) sum[i] = (sum[i] + second[i]) + (third[i] + fourth[i]);
  for (int64_t i = std::max<int64_t>(packets, 0); i < count; ++i) sum[i] += second[i] + third[i] + fourth[i];
}

// TensorContractionThreadPool.h, EvalShardedByInnerDimContext: each four parts, then these sums. The total is in the
// first part.
//
// Args:
//   packets: how many of the `count` elements are in packets.
void AddParts(const std::vector<float*>& parts, int64_t packets, int64_t count) {
  constexpr size_t kRange = 4;
  std::vector<float*> ranges;
  for (size_t first = 0; first < parts.size(); first += kRange) {
    const size_t size = std::min(kRange, parts.size() - first);
    if (size == kRange) {
      AddThree(parts[first], parts[first + 1], parts[first + 2], parts[first + 3], packets, count);
    } else {
      for (size_t i = 1; i < size; ++i) AddTo(parts[first + i], count, parts[first]);
    }
    ranges.push_back(parts[first]);
  }
  size_t next = 1;
  for (; next + 2 < ranges.size(); next += 3) {
    AddThree(ranges[0], ranges[next], ranges[next + 1], ranges[next + 2], packets, count);
  }
  for (; next < ranges.size(); ++next) AddTo(ranges[next], count, ranges[0]);
}

// GeneralMatrixVector.h, for columns: the sum of rows, each times a number. Without FMA, as TensorFlow is compiled.
void MultiplyVector(const float* rows, const float* numbers, int64_t count, int64_t width, float* product) {
  std::fill_n(product, width, 0.0f);
  for (int64_t row = 0; row < count; ++row) {
    for (int64_t i = 0; i < width; ++i) product[i] += rows[row * width + i] * numbers[row];
  }
}

class AddProductsOp : public OpKernel {
 public:
  explicit AddProductsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, patches_.Get(ctx));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("begin", &begin_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("rows", &rows_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("chunk", &chunk_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("closed", &is_closed_));
    OP_REQUIRES_OK(ctx, Order::Get(ctx, "shard", &shard_));
    OP_REQUIRES_OK(ctx, Order::Get(ctx, "last_shard", &last_));
    OP_REQUIRES(ctx, (rows_ - 1) / shard_.rows * shard_.rows + last_.rows == rows_,
                absl::InvalidArgumentError(absl::StrCat("'", name(), "' has shards that are not all of its rows.")));
    OP_REQUIRES_OK(ctx, products_.Make(ctx, /*transpose_a=*/true, /*transpose_b=*/false));
    shards_ = (rows_ + shard_.rows - 1) / shard_.rows;
    depth_ = std::max(shard_.most(), last_.most());
    // The first part of the only shard is added up in the output.
    slots_ = std::max(shard_.parts(), last_.parts()) - (shards_ == 1 ? 1 : 0);
  }

  void Compute(OpKernelContext* ctx) override {
    Run run(ctx);
    OP_REQUIRES_OK(ctx, Prepare(&run));
    for (run.first = 0; run.first < run.width; run.first += chunk_) {
      run.last = std::min(run.first + chunk_, run.width);
      OP_REQUIRES_OK(ctx, AddChunk(&run));
    }
    if (run.is_open) Keep(&run);
  }

 private:
  // A call. Elements of patches from `first` to `last` are multiplied.
  struct Run {
    explicit Run(OpKernelContext* ctx) : ctx(ctx), images(ctx->input(0)), gradients(ctx->input(1)) {}

    OpKernelContext* ctx;
    const Tensor images, gradients;
    int64_t width = 0, made = 0, count = 0;  // of patches, of gradients, how many of both
    float *sum = nullptr, *slots = nullptr;
    const float* before = nullptr;
    float *kept = nullptr, *kept_columns = nullptr;  // of a block that is not complete, in the state: the gradients first
    Tensor kept_rows;                                // the state
    Tensor columns, gradient, product, own_slots;
    int64_t first = 0, last = 0;
    bool is_open = false;  // whether the last block is not complete
  };

  absl::Status Prepare(Run* run) {
    OpKernelContext* const ctx = run->ctx;
    const int dims = run->gradients.dims();
    run->made = dims > 0 ? run->gradients.dim_size(dims - 1) : 0;
    run->count = run->made > 0 ? run->gradients.NumElements() / run->made : 0;
    const int image_dims = run->images.dims();
    run->width = image_dims > 0 ? patches_.Elements(run->images.dim_size(image_dims - 1)) : 0;
    if (run->count < 1 || run->width < 1 || patches_.Positions(run->images.shape()) != run->count ||
        run->count > rows_ || begin_ > rows_ - run->count || run->width > Patches::kMost ||
        run->made > Patches::kMost || !(Elements(*run) < kMostElements)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "'", name(), "' is given images of shape ", run->images.shape().DebugString(), " and gradients of shape ",
          run->gradients.shape().DebugString(), " for rows from ", begin_, " on of ", rows_, "."));
    }
    if (is_closed_ && !(IsEnd(begin_) && IsEnd(begin_ + run->count))) {
      return absl::InvalidArgumentError(absl::StrCat("'", name(), "' has no state, and is given rows from ", begin_,
                                                     " to ", begin_ + run->count, ", where sums are not complete."));
    }
    const int64_t elements = is_closed_ ? 0 : slots_ * run->width * run->made + depth_ * (run->width + run->made);
    Tensor *sum, *state;
    TF_RETURN_IF_ERROR(Continue(ctx, 0, TensorShape({run->width, run->made}), &sum));
    TF_RETURN_IF_ERROR(Continue(ctx, 1, TensorShape({elements}), &state));
    run->sum = sum->flat<float>().data();
    const int64_t chunk = std::min(chunk_, run->width);
    TF_RETURN_IF_ERROR(Temporary(ctx, depth_ * chunk, &run->columns));
    TF_RETURN_IF_ERROR(Temporary(ctx, chunk * run->made, &run->product));
    if (!IsAligned(run->made)) TF_RETURN_IF_ERROR(Temporary(ctx, depth_ * run->made, &run->gradient));
    if (!is_closed_) {
      run->kept_rows = *state;
      run->kept = state->flat<float>().data();
      run->kept_columns = run->kept + depth_ * run->made;
      run->slots = run->kept_columns + depth_ * run->width;
    } else if (slots_ > 0) {
      TF_RETURN_IF_ERROR(Temporary(ctx, slots_ * chunk * run->made, &run->own_slots));
      run->slots = run->own_slots.flat<float>().data();
    }
    return absl::OkStatus();
  }

  // The most elements of a buffer, roughly, so that none is counted wrong.
  double Elements(const Run& run) const {
    const double width = static_cast<double>(run.width), made = static_cast<double>(run.made);
    return (static_cast<double>(slots_) + 1) * width * made + static_cast<double>(depth_) * (width + made);
  }

  static absl::Status Temporary(OpKernelContext* ctx, int64_t elements, Tensor* made) {
    return ctx->allocate_temp(tensorflow::DT_FLOAT, TensorShape({elements}), made);
  }

  // Sets an output to what the slice before has made, if there is one, in its buffer if it can be forwarded.
  absl::Status Continue(OpKernelContext* ctx, int output, const TensorShape& shape, Tensor** made) {
    if (ctx->num_inputs() < 3 + output) return ctx->allocate_output(output, shape, made);
    const Tensor& before = ctx->input(2 + output);
    if (before.shape() != shape) {
      return absl::InvalidArgumentError(absl::StrCat("'", name(), "' continues a tensor of shape ",
                                                     shape.DebugString(), ", and is given one of shape ",
                                                     before.shape().DebugString(), "."));
    }
    int forwarded = -1;
    TF_RETURN_IF_ERROR(ctx->forward_input_or_allocate_output({2 + output}, output, shape, made, &forwarded));
    if (forwarded < 0) std::memcpy((*made)->data(), before.data(), before.TotalBytes());
    return absl::OkStatus();
  }

  // Whether no sum of a part, and no block, goes on at a row.
  bool IsEnd(int64_t row) const {
    if (row == 0 || row == rows_) return true;
    return slots_ == 0 ? Locate(row).begin == row : row % shard_.rows == 0;
  }

  Block Locate(int64_t row) const {
    const int64_t shard = row / shard_.rows, begin = shard * shard_.rows, within = row - begin;
    const Order& order = shard == shards_ - 1 ? last_ : shard_;
    const int64_t part = within / order.part, part_begin = part * order.part;
    const int64_t part_end = std::min(part_begin + order.part, order.rows);
    const int64_t size = part == order.parts() - 1 ? order.last_block : order.block;
    const int64_t block = part_begin + (within - part_begin) / size * size, end = std::min(block + size, part_end);
    return {begin + block, begin + end,       part,           block == part_begin,
            end == order.rows, shard == 0, order.parts()};
  }

  // Whether rows of gradients begin where kernels need it.
  static bool IsAligned(int64_t made) { return made * sizeof(float) % EIGEN_MAX_ALIGN_BYTES == 0; }

  // Adds what the slice has of the elements of patches from `first` to `last`.
  absl::Status AddChunk(Run* run) {
    const int64_t width = run->last - run->first;
    float* const columns = run->columns.flat<float>().data();
    Block block = Locate(begin_);
    if (block.begin < begin_) {
      std::memcpy(columns, run->kept_columns + depth_ * run->first, (begin_ - block.begin) * width * sizeof(float));
    }
    const int64_t end = begin_ + run->count;
    for (int64_t row = begin_; row < end;) {
      block = Locate(row);
      const int64_t to = std::min(block.end, end);
      Fill(*run, row, to, columns + (row - block.begin) * width);
      row = to;
      run->is_open = row < block.end;
      if (!run->is_open) TF_RETURN_IF_ERROR(Add(run, block));
    }
    if (run->is_open) {
      std::memcpy(run->kept_columns + depth_ * run->first, columns, (end - block.begin) * width * sizeof(float));
    }
    return absl::OkStatus();
  }

  // Keeps the gradients of the last block, which is not complete.
  void Keep(Run* run) const {
    const int64_t end = begin_ + run->count, first = std::max(Locate(end - 1).begin, begin_);
    const float* const gradients = run->gradients.flat<float>().data();
    std::memcpy(run->kept + (first - Locate(end - 1).begin) * run->made, gradients + (first - begin_) * run->made,
                (end - first) * run->made * sizeof(float));
  }

  // The gradients of a block: those of the slice, in place, or also those that the slice before has kept.
  absl::Status GradientsOf(Run* run, const Block& block, Tensor* found) const {
    const int64_t depth = block.end - block.begin, first = std::max(block.begin, begin_);
    const float* const from = run->gradients.flat<float>().data() + (first - begin_) * run->made;
    const int64_t bytes = (block.end - first) * run->made * sizeof(float);
    const bool is_begun = block.begin < begin_;
    if (is_begun) std::memcpy(run->kept + (first - block.begin) * run->made, from, bytes);
    const float* const all = is_begun ? run->kept : from;
    if (reinterpret_cast<uintptr_t>(all) % EIGEN_MAX_ALIGN_BYTES == 0) {
      const Tensor& rows = is_begun ? run->kept_rows : run->gradients;
      const int64_t offset = all - rows.flat<float>().data();
      Tensor flat;
      if (flat.CopyFrom(rows, TensorShape({rows.NumElements()})) &&
          found->CopyFrom(flat.Slice(offset, offset + depth * run->made), TensorShape({depth, run->made}))) {
        return absl::OkStatus();
      }
      return absl::InternalError("Rows of a tensor are no tensor.");
    }
    if (!run->gradient.IsInitialized()) {
      TF_RETURN_IF_ERROR(Temporary(run->ctx, depth_ * run->made, &run->gradient));
    }
    std::memcpy(run->gradient.data(), all, depth * run->made * sizeof(float));
    *found = MatrixIn(run->gradient, depth, run->made);
    return absl::OkStatus();
  }

  // Lays out the patches of rows.
  void Fill(const Run& run, int64_t row, int64_t to, float* columns) const {
    const Patches::Sizes image = patches_.ImageOf(run.images.shape());
    const int64_t pixel_bytes = run.images.dim_size(run.images.dims() - 1) * sizeof(float);
    const int64_t width_bytes = (run.last - run.first) * sizeof(float);
    const char* const images = static_cast<const char*>(run.images.data());
    const auto threads = run.ctx->device()->tensorflow_cpu_worker_threads();
    tensorflow::Shard(threads->num_threads, threads->workers, to - row, width_bytes, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        patches_.Copy(images, image, pixel_bytes, row - begin_ + i, run.first * sizeof(float),
                      run.last * sizeof(float), reinterpret_cast<char*>(columns) + i * width_bytes);
      }
    });
  }

  // Where the sum of a part is, of the elements of patches from `first` on.
  float* PartOf(const Run& run, int64_t part) const {
    const int64_t slot = shards_ == 1 ? part - 1 : part;
    if (slot < 0) return run.sum + run.first * run.made;
    if (is_closed_) return run.slots + slot * std::min(chunk_, run.width) * run.made;
    return run.slots + (slot * run.width + run.first) * run.made;
  }

  // Multiplies a block, and adds the product to the sum of its part. After a shard's last block, adds up the shard.
  absl::Status Add(Run* run, const Block& block) {
    const int64_t width = run->last - run->first, depth = block.end - block.begin, count = width * run->made;
    Tensor gradients;
    TF_RETURN_IF_ERROR(GradientsOf(run, block, &gradients));
    if (run->made == 1) {
      MultiplyVector(run->columns.flat<float>().data(), gradients.flat<float>().data(), depth, width,
                     run->product.flat<float>().data());
    } else {
      TF_RETURN_IF_ERROR(products_.Multiply(run->ctx, MatrixIn(run->columns, depth, width), gradients, &run->product));
    }
    const float* const product = run->product.flat<float>().data();
    float* const part = PartOf(*run, block.part);
    if (block.begins_part) {
      std::copy_n(product, count, part);
    } else {
      AddTo(product, count, part);
    }
    if (!block.ends_shard) return absl::OkStatus();
    std::vector<float*> parts;
    for (int64_t i = 0; i < block.parts; ++i) parts.push_back(PartOf(*run, i));
    const int64_t all = run->width * run->made;
    AddParts(parts, std::min(all - all % kPacket - run->first * run->made, count), count);
    if (shards_ == 1) return absl::OkStatus();
    float* const sum = run->sum + run->first * run->made;
    if (block.is_first_shard) {
      std::copy_n(parts[0], count, sum);
    } else {
      AddTo(parts[0], count, sum);
    }
    return absl::OkStatus();
  }

  static constexpr double kMostElements = 1e15;
  static constexpr int64_t kPacket = 8;  // the floats of a packet, in a TensorFlow for AVX

  Patches patches_;
  Order shard_, last_;
  LentProducts products_;
  bool is_closed_;
  int64_t begin_, rows_, chunk_, shards_ = 0, depth_ = 0, slots_ = 0;
};

REGISTER_KERNEL_BUILDER(Name("Tfswap>AddProducts").Device(tensorflow::DEVICE_CPU), AddProductsOp);

}  // namespace
}  // namespace tfswap
