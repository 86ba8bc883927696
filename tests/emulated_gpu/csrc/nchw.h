// Images and volumes with channels first, which the CPU's kernels do not know: turned for them, and their results turned back.

#ifndef TESTS_EMULATED_GPU_CSRC_NCHW_H_
#define TESTS_EMULATED_GPU_CSRC_NCHW_H_

#include <string>
#include <vector>

#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/framework/tensor.h"

namespace emulated_gpu {

// Which of an op's inputs and results are images.
struct Images {
  std::vector<int> images;   // inputs
  std::vector<int> sizes;    // inputs that are shapes of images
  std::vector<int> results;
};

// Null for ops without images.
const Images* ImagesOf(const std::string& op);

// Makes the node one of channels last; false where it is one.
bool ToChannelsLast(tensorflow::NodeDef* node);

// Whether it has channels: a list of images, signals or volumes.
bool IsImage(const tensorflow::Tensor& tensor);

bool Has(const std::vector<int>& some, int i);

// In host memory.
tensorflow::Tensor ImageToChannelsLast(const tensorflow::Tensor& image);
tensorflow::Tensor SizesToChannelsLast(const tensorflow::Tensor& sizes);
tensorflow::TensorShape ShapeToChannelsFirst(const tensorflow::TensorShape& shape);
void ImageToChannelsFirst(const tensorflow::Tensor& image, tensorflow::Tensor* to);

}  // namespace emulated_gpu

#endif  // TESTS_EMULATED_GPU_CSRC_NCHW_H_
