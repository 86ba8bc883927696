#include "halves.h"

#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/types.h"

namespace emulated_gpu {
namespace {

using tensorflow::DataType;
using tensorflow::Tensor;

template <typename From, typename To>
Tensor Cast(const Tensor& tensor) {
  Tensor made(tensorflow::cpu_allocator(), tensorflow::DataTypeToEnum<To>::value, tensor.shape());
  const From* const from = static_cast<const From*>(tensor.data());
  To* const to = static_cast<To*>(made.data());
  for (int64_t i = 0; i < tensor.NumElements(); ++i) to[i] = static_cast<To>(from[i]);
  return made;
}

bool IsHalf(DataType type) { return type == tensorflow::DT_HALF || type == tensorflow::DT_BFLOAT16; }

}  // namespace

bool ToFloats(tensorflow::NodeDef* node) {
  if (node->op() != "_FusedConv2D") return false;
  auto& type = (*node->mutable_attr())["T"];
  if (!IsHalf(type.type())) return false;
  type.set_type(tensorflow::DT_FLOAT);
  return true;
}

bool IsHalf(const Tensor& tensor) { return IsHalf(tensor.dtype()); }

Tensor HalfToFloat(const Tensor& tensor) {
  if (tensor.dtype() == tensorflow::DT_HALF) return Cast<Eigen::half, float>(tensor);
  return Cast<tensorflow::bfloat16, float>(tensor);
}

Tensor FloatToHalf(const Tensor& tensor, DataType type) {
  if (type == tensorflow::DT_HALF) return Cast<float, Eigen::half>(tensor);
  return Cast<float, tensorflow::bfloat16>(tensor);
}

}  // namespace emulated_gpu
