#include "nchw.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/types.h"

namespace emulated_gpu {
namespace {

using tensorflow::Tensor;
using tensorflow::TensorShape;

// From [a, b, c] to [a, c, b].
void TurnBytes(const void* from, void* to, int64_t a, int64_t b, int64_t c, size_t element) {
  const auto* const in = static_cast<const char*>(from);
  auto* const out = static_cast<char*>(to);
  for (int64_t i = 0; i < a; ++i) {
    for (int64_t j = 0; j < b; ++j) {
      for (int64_t k = 0; k < c; ++k) {
        std::memcpy(out + ((i * c + k) * b + j) * element, in + ((i * b + j) * c + k) * element, element);
      }
    }
  }
}

// Where an axis of an image with channels last is in one with channels first.
int AxisBefore(int axis, int rank) { return axis == 0 ? 0 : axis == rank - 1 ? 1 : axis + 1; }

// Of one channel of one image.
int64_t Pixels(const Tensor& image, int64_t channels) { return channels == 0 ? 0 : image.NumElements() / channels; }

size_t ElementBytes(const Tensor& tensor) { return static_cast<size_t>(tensorflow::DataTypeSize(tensor.dtype())); }

}  // namespace

const Images* ImagesOf(const std::string& op) {
  static const auto* const table = new std::map<std::string, Images>{
      {"AvgPool", {{0}, {}, {0}}},
      {"AvgPool3D", {{0}, {}, {0}}},
      {"AvgPool3DGrad", {{1}, {0}, {0}}},
      {"AvgPoolGrad", {{1}, {0}, {0}}},
      {"BiasAdd", {{0}, {}, {0}}},
      {"BiasAddGrad", {{0}, {}, {}}},
      {"Conv2D", {{0}, {}, {0}}},
      {"Conv2DBackpropFilter", {{0, 2}, {}, {}}},
      {"Conv2DBackpropInput", {{2}, {0}, {0}}},
      {"Conv3D", {{0}, {}, {0}}},
      {"Conv3DBackpropFilterV2", {{0, 2}, {}, {}}},
      {"Conv3DBackpropInputV2", {{2}, {0}, {0}}},
      {"DepthToSpace", {{0}, {}, {0}}},
      {"DepthwiseConv2dNative", {{0}, {}, {0}}},
      {"DepthwiseConv2dNativeBackpropFilter", {{0, 2}, {}, {}}},
      {"DepthwiseConv2dNativeBackpropInput", {{2}, {0}, {0}}},
      {"FusedBatchNorm", {{0}, {}, {0}}},
      {"FusedBatchNormGrad", {{0, 1}, {}, {0}}},
      {"FusedBatchNormGradV2", {{0, 1}, {}, {0}}},
      {"FusedBatchNormGradV3", {{0, 1}, {}, {0}}},
      {"FusedBatchNormV2", {{0}, {}, {0}}},
      {"FusedBatchNormV3", {{0}, {}, {0}}},
      {"MaxPool", {{0}, {}, {0}}},
      {"MaxPool3D", {{0}, {}, {0}}},
      {"MaxPool3DGrad", {{0, 1, 2}, {}, {0}}},
      {"MaxPoolGrad", {{0, 1, 2}, {}, {0}}},
      {"SpaceToDepth", {{0}, {}, {0}}},
      {"_FusedConv2D", {{0}, {}, {0}}},
  };
  const auto found = table->find(op);
  return found == table->end() ? nullptr : &found->second;
}

bool ToChannelsLast(tensorflow::NodeDef* node) {
  static const auto* const kTurned = new std::map<std::string, std::string>{{"NCDHW", "NDHWC"}, {"NCHW", "NHWC"}};
  auto& attributes = *node->mutable_attr();
  const auto format = attributes.find("data_format");
  const auto turned = format == attributes.end() ? kTurned->end() : kTurned->find(format->second.s());
  if (turned == kTurned->end()) return false;
  format->second.set_s(turned->second);
  const int rank = static_cast<int>(turned->first.size());
  for (const char* const name : {"strides", "dilations", "ksize", "explicit_paddings"}) {
    if (attributes.count(name) == 0) continue;
    auto* const values = attributes[name].mutable_list()->mutable_i();
    const std::vector<int64_t> old(values->begin(), values->end());
    const int each = static_cast<int>(old.size()) / rank;
    for (int i = 0; i < rank && each > 0; ++i) {
      for (int j = 0; j < each; ++j) values->Set(i * each + j, old[AxisBefore(i, rank) * each + j]);
    }
  }
  return true;
}

bool Has(const std::vector<int>& some, int i) { return std::find(some.begin(), some.end(), i) != some.end(); }

bool IsImage(const Tensor& tensor) { return tensor.dims() > 2; }

Tensor ImageToChannelsLast(const Tensor& image) {
  const TensorShape& shape = image.shape();
  TensorShape turned_shape = shape;
  for (int i = 0; i < shape.dims(); ++i) turned_shape.set_dim(i, shape.dim_size(AxisBefore(i, shape.dims())));
  Tensor turned(tensorflow::cpu_allocator(), image.dtype(), turned_shape);
  const int64_t n = shape.dim_size(0), c = shape.dim_size(1);
  TurnBytes(image.data(), turned.data(), n, c, Pixels(image, n * c), ElementBytes(image));
  return turned;
}

Tensor SizesToChannelsLast(const Tensor& sizes) {
  const int rank = static_cast<int>(sizes.NumElements());
  if (rank <= 2) return sizes;
  const size_t element = ElementBytes(sizes);
  Tensor turned(tensorflow::cpu_allocator(), sizes.dtype(), sizes.shape());
  for (int i = 0; i < rank; ++i) {
    std::memcpy(static_cast<char*>(turned.data()) + i * element,
                static_cast<const char*>(sizes.data()) + AxisBefore(i, rank) * element, element);
  }
  return turned;
}

TensorShape ShapeToChannelsFirst(const TensorShape& shape) {
  TensorShape turned = shape;
  for (int i = 0; i < shape.dims(); ++i) turned.set_dim(AxisBefore(i, shape.dims()), shape.dim_size(i));
  return turned;
}

void ImageToChannelsFirst(const Tensor& image, Tensor* to) {
  const int64_t n = image.dim_size(0), c = image.dim_size(image.dims() - 1);
  TurnBytes(image.data(), to->data(), n, Pixels(image, n * c), c, ElementBytes(image));
}

}  // namespace emulated_gpu
