#include "temporaries.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "algorithms.h"
#include "settings.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/util/determinism.h"

namespace emulated_gpu {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using Sizes = std::vector<int64_t>;

int64_t Bytes(const Tensor& tensor) { return static_cast<int64_t>(tensor.TotalBytes()); }

bool ChannelsLast(const OpKernel& kernel) {
  std::string format;
  return tensorflow::TryGetNodeAttr(kernel.def(), "data_format", &format) && absl::EndsWith(format, "C");
}

bool IsHalf(const Tensor& tensor) {
  return tensor.dtype() == tensorflow::DT_HALF || tensor.dtype() == tensorflow::DT_BFLOAT16;
}

// The image with its padding, where it has more at one end than at the other: cuDNN knows but one padding for both.
Sizes Padded(const OpKernel& kernel, const Tensor& image, const TensorShape& filter, const TensorShape& result) {
  std::string padding;
  std::vector<int64_t> strides, dilations(8, 1);
  tensorflow::TryGetNodeAttr(kernel.def(), "padding", &padding);
  tensorflow::TryGetNodeAttr(kernel.def(), "strides", &strides);
  tensorflow::TryGetNodeAttr(kernel.def(), "dilations", &dilations);
  if (padding != "SAME") return {};
  const int first = ChannelsLast(kernel) ? 1 : 2;
  int64_t bytes = Bytes(image);
  bool uneven = false;
  for (int i = 0; i < filter.dims() - 2; ++i) {
    const int axis = first + i;
    const int64_t extent = image.dim_size(axis), reach = (filter.dim_size(i) - 1) * dilations[axis] + 1;
    const int64_t missing = std::max<int64_t>((result.dim_size(axis) - 1) * strides[axis] + reach - extent, 0);
    if (missing % 2 == 0) continue;
    bytes = bytes / extent * (extent + 1);
    uneven = true;
  }
  return uneven ? Sizes{bytes} : Sizes{};
}

Sizes Joined(Sizes some, const Sizes& more) {
  some.insert(some.end(), more.begin(), more.end());
  return some;
}

// conv_ops_gpu.h, LaunchConvOpImpl: the filter in cuDNN's layout, and what it has with channels last.
Sizes Convolution(const OpKernel& kernel, OpKernelContext* ctx) {
  const Tensor &image = ctx->input(0), &filter = ctx->input(1), &result = *ctx->mutable_output(0);
  const Sizes sizes = Joined({Bytes(filter)}, Padded(kernel, image, filter.shape(), result.shape()));
  return ChannelsLast(kernel) && !IsHalf(image) ? Joined(sizes, {Bytes(image), Bytes(result)}) : sizes;
}

// conv_grad_input_ops.cc, LaunchConv2DBackpropInputOpImpl: the filter, and the gradient as cuDNN writes it.
Sizes InputGradient(const OpKernel& kernel, OpKernelContext* ctx) {
  const Tensor &filter = ctx->input(1), &gradient = ctx->input(2), &image = *ctx->mutable_output(0);
  const Sizes padded = Padded(kernel, image, filter.shape(), gradient.shape());
  const Sizes sizes = Joined({Bytes(filter)}, padded.empty() ? Sizes{Bytes(image)} : padded);
  return ChannelsLast(kernel) && !IsHalf(image) ? Joined(sizes, {Bytes(gradient)}) : sizes;
}

// conv_grad_filter_ops.cc, LaunchConv2DBackpropFilterOpImpl: the filter's gradient as cuDNN has it.
Sizes FilterGradient(const OpKernel& kernel, OpKernelContext* ctx) {
  const Tensor &image = ctx->input(0), &gradient = ctx->input(2), &filter = *ctx->mutable_output(0);
  const Sizes sizes = Joined({Bytes(filter)}, Padded(kernel, image, filter.shape(), gradient.shape()));
  return ChannelsLast(kernel) && !IsHalf(image) ? Joined(sizes, {Bytes(image), Bytes(gradient)}) : sizes;
}

// depthwise_conv_grad_op.cc: as convolutions in groups, whose filter's gradient is transposed.
Sizes DepthwiseFilterGradient(const OpKernel&, OpKernelContext* ctx) { return {Bytes(*ctx->mutable_output(0))}; }

// softmax_op_gpu.cu.cc: each row's largest logit and its sum, in tensors of the result's shape.
Sizes Softmax(const OpKernel&, OpKernelContext* ctx) {
  const Tensor& result = *ctx->mutable_output(0);
  return {Bytes(result), (IsHalf(result) ? 2 : 1) * Bytes(result)};
}

// bias_op.cc, ComputeWithReduceSum: where results must be the same each time, a copy with the channels last.
Sizes BiasGradient(const OpKernel& kernel, OpKernelContext* ctx) {
  const bool copies = tensorflow::OpDeterminismRequired() && !ChannelsLast(kernel);
  return copies ? Sizes{Bytes(ctx->input(0))} : Sizes{};
}

// segment_reduction_ops_gpu.cu.h: where results must be the same each time, segments are sorted first, by cub.
Sizes SegmentSum(const OpKernel&, OpKernelContext* ctx) {
  if (!tensorflow::OpDeterminismRequired()) return {};
  const Tensor& segments = ctx->input(1);
  const int64_t keys = Bytes(segments), key = tensorflow::DataTypeSize(segments.dtype());
  return {keys, keys, keys, 2 * keys + keys / 32 + (int64_t{16} << 10), ctx->mutable_output(0)->dim_size(0) * key};
}

using Rule = Sizes (*)(const OpKernel&, OpKernelContext*);

const std::map<std::string, Rule>& Rules() {
  static const auto* const rules = new std::map<std::string, Rule>{
      {"BiasAddGrad", BiasGradient},
      {"Conv2D", Convolution},
      {"Conv2DBackpropFilter", FilterGradient},
      {"Conv2DBackpropInput", InputGradient},
      {"Conv3D", Convolution},
      {"Conv3DBackpropFilterV2", FilterGradient},
      {"Conv3DBackpropInputV2", InputGradient},
      {"DepthwiseConv2dNativeBackpropFilter", DepthwiseFilterGradient},
      {"LogSoftmax", Softmax},
      {"Softmax", Softmax},
      {"UnsortedSegmentSum", SegmentSum},
      {"_FusedConv2D", Convolution},
  };
  return *rules;
}

absl::Status AllocateOne(OpKernelContext* ctx, int64_t bytes, std::vector<Tensor>* tensors) {
  Tensor tensor;
  TF_RETURN_IF_ERROR(ctx->allocate_temp(tensorflow::DT_INT8, TensorShape({bytes}), &tensor));
  if (bytes > 0) tensors->push_back(std::move(tensor));
  return absl::OkStatus();
}

}  // namespace

bool SharesTemporaries(const std::string& op) {
  static const auto* const ops = new std::set<std::string>{
      "Einsum",                               // einsum_op_impl.h
      "MirrorPadGrad",                        // mirror_pad_op.cc
      "SoftmaxCrossEntropyWithLogits",        // xent_op.cc
      "SparseSoftmaxCrossEntropyWithLogits",  // sparse_xent_op.cc
  };
  return Settings::Get().temporaries && ops->count(op) != 0;
}

std::vector<Tensor> AllocateTemporaries(OpKernel* kernel, OpKernelContext* ctx) {
  std::vector<Tensor> tensors;
  const std::string& op = kernel->type_string();
  if (!Settings::Get().temporaries || ctx->num_outputs() == 0) return tensors;
  if (absl::StrContains(op, "MatMul")) AllocateOne(ctx, Settings::Get().product_workspace_bytes, &tensors).IgnoreError();
  const auto rule = Rules().find(op);
  if (rule == Rules().end() || Bytes(*ctx->mutable_output(0)) == 0) return tensors;
  for (const int64_t bytes : rule->second(*kernel, ctx)) {
    const absl::Status status = AllocateOne(ctx, bytes, &tensors);
    if (!status.ok()) {
      ctx->SetStatus(status);
      return tensors;
    }
  }
  const bool convolves = absl::StrContains(op, "Conv") && !absl::StartsWith(op, "Depthwise");
  if (!convolves) return tensors;
  for (Tensor& each : AllocateWorkspace(*kernel, ctx, Bytes(*ctx->mutable_output(0)))) tensors.push_back(std::move(each));
  return tensors;
}

}  // namespace emulated_gpu
