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

size_t ElementBytes(const Tensor& tensor) { return static_cast<size_t>(tensorflow::DataTypeSize(tensor.dtype())); }

}  // namespace

const Images* ImagesOf(const std::string& op) {
  static const auto* const table = new std::map<std::string, Images>{
      {"AvgPool", {{0}, {}, {0}}},
      {"AvgPoolGrad", {{1}, {0}, {0}}},
      {"BiasAdd", {{0}, {}, {0}}},
      {"BiasAddGrad", {{0}, {}, {}}},
      {"Conv2D", {{0}, {}, {0}}},
      {"Conv2DBackpropFilter", {{0, 2}, {}, {}}},
      {"Conv2DBackpropInput", {{2}, {0}, {0}}},
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
      {"MaxPoolGrad", {{0, 1, 2}, {}, {0}}},
      {"_FusedConv2D", {{0}, {}, {0}}},
  };
  const auto found = table->find(op);
  return found == table->end() ? nullptr : &found->second;
}

bool ToChannelsLast(tensorflow::NodeDef* node) {
  auto& attributes = *node->mutable_attr();
  if (attributes.count("data_format") == 0 || attributes["data_format"].s() != "NCHW") return false;
  attributes["data_format"].set_s("NHWC");
  for (const char* const name : {"strides", "dilations", "ksize", "explicit_paddings"}) {
    if (attributes.count(name) == 0) continue;
    auto* const values = attributes[name].mutable_list()->mutable_i();
    const std::vector<int64_t> old(values->begin(), values->end());
    const int each = static_cast<int>(old.size()) / 4;
    for (int i = 0; i < 4 && each > 0; ++i) {
      const int from = i == 0 ? 0 : i == 3 ? 1 : i + 1;
      for (int j = 0; j < each; ++j) values->Set(i * each + j, old[from * each + j]);
    }
  }
  return true;
}

bool Has(const std::vector<int>& some, int i) { return std::find(some.begin(), some.end(), i) != some.end(); }

Tensor ImageToChannelsLast(const Tensor& image) {
  const TensorShape& shape = image.shape();
  const int64_t n = shape.dim_size(0), c = shape.dim_size(1), h = shape.dim_size(2), w = shape.dim_size(3);
  Tensor turned(tensorflow::cpu_allocator(), image.dtype(), TensorShape({n, h, w, c}));
  TurnBytes(image.data(), turned.data(), n, c, h * w, ElementBytes(image));
  return turned;
}

Tensor SizesToChannelsLast(const Tensor& sizes) {
  if (sizes.NumElements() != 4) return sizes;
  const auto from = sizes.flat<int32_t>();
  Tensor turned(tensorflow::cpu_allocator(), sizes.dtype(), sizes.shape());
  auto to = turned.flat<int32_t>();
  to(0) = from(0), to(1) = from(2), to(2) = from(3), to(3) = from(1);
  return turned;
}

TensorShape ShapeToChannelsFirst(const TensorShape& shape) {
  return TensorShape({shape.dim_size(0), shape.dim_size(3), shape.dim_size(1), shape.dim_size(2)});
}

void ImageToChannelsFirst(const Tensor& image, Tensor* to) {
  const TensorShape& shape = image.shape();
  TurnBytes(image.data(), to->data(), shape.dim_size(0), shape.dim_size(1) * shape.dim_size(2), shape.dim_size(3),
            ElementBytes(image));
}

}  // namespace emulated_gpu
