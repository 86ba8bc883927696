// The patches of images that a filter's window reads: the columns of a convolution.

#ifndef TFSWAP_OPS_CSRC_CORE_PATCHES_H_
#define TFSWAP_OPS_CSRC_CORE_PATCHES_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/util/overflow.h"

namespace tfswap {

// How a window moves over images that have their channels last, from the attributes window, strides, dilations, padding
// and sizes of an op.
class Patches {
 public:
  static constexpr int kMostAxes = 3;
  static constexpr int64_t kMost = int64_t{1} << 30;  // so that no place overflows

  // Sizes along the axes of an image; those of fewer axes have ones before them.
  using Sizes = std::array<int64_t, kMostAxes>;

  absl::Status Get(tensorflow::OpKernelConstruction* ctx) {
    TF_RETURN_IF_ERROR(Get(ctx, "window", 1, &window_));
    TF_RETURN_IF_ERROR(Get(ctx, "strides", 1, &strides_));
    TF_RETURN_IF_ERROR(Get(ctx, "dilations", 1, &dilations_));
    TF_RETURN_IF_ERROR(Get(ctx, "padding", 0, &padding_));
    return Get(ctx, "sizes", 1, &sizes_);
  }

  int axes() const { return axes_; }
  const Sizes& window() const { return window_; }

  // The positions of the window on these images; -1 where they have other axes, or too many positions.
  int64_t Positions(const tensorflow::TensorShape& images) const {
    return images.dims() == axes_ + 2 ? Product(sizes_, images.dim_size(0)) : -1;
  }

  // The elements of a patch; -1 where they are too many.
  int64_t Elements(int64_t channels) const { return Product(window_, channels); }

  // The sizes of an image.
  Sizes ImageOf(const tensorflow::TensorShape& images) const {
    Sizes image{1, 1, 1};
    for (int axis = 0; axis < axes_; ++axis) image[kMostAxes - axes_ + axis] = images.dim_size(1 + axis);
    return image;
  }

  // Where the window begins at a position, by axis; the image of that position.
  Sizes StartOf(int64_t position, int64_t* image) const {
    Sizes start;
    for (int axis = kMostAxes - 1; axis >= 0; --axis) {
      start[axis] = position % sizes_[axis] * strides_[axis] - padding_[axis];
      position /= sizes_[axis];
    }
    *image = position;
    return start;
  }

  // Copies the bytes from `first` to `last` of the patch at a position.
  void Copy(const char* images, const Sizes& image, int64_t pixel_bytes, int64_t position, int64_t first, int64_t last,
            char* to) const {
    int64_t number;
    const Sizes start = StartOf(position, &number);
    const char* const whole = images + number * Product(image, pixel_bytes);
    const int64_t run_bytes = window_[2] * pixel_bytes;
    int64_t offset = 0;
    for (int64_t i = 0; i < window_[0]; ++i) {
      const int64_t plane = start[0] + i * dilations_[0];
      for (int64_t j = 0; j < window_[1]; ++j, offset += run_bytes) {
        const int64_t begin = std::max(first, offset) - offset, end = std::min(last - offset, run_bytes);
        if (begin >= end) continue;
        const int64_t line = start[1] + j * dilations_[1];
        if (plane < 0 || plane >= image[0] || line < 0 || line >= image[1]) {
          std::memset(to, 0, end - begin);
        } else {
          const char* const from = whole + (plane * image[1] + line) * image[2] * pixel_bytes;
          CopyLine(from, image[2], pixel_bytes, start[2], begin, end, to);
        }
        to += end - begin;
      }
    }
  }

  // How far the window reaches along an axis.
  int64_t Reach(int axis) const { return (window_[axis] - 1) * dilations_[axis] + 1; }

  // Adds the patch at a position to an image, as far as it is in pixels from `low` to `high`.
  void AddTo(float* image, const Sizes& sizes, const Sizes& low, const Sizes& high, int64_t channels, int64_t position,
             const float* patch) const {
    int64_t number;
    const Sizes start = StartOf(position, &number);
    for (int64_t i = 0; i < window_[0]; ++i) {
      const int64_t plane = start[0] + i * dilations_[0];
      for (int64_t j = 0; j < window_[1]; ++j, patch += window_[2] * channels) {
        const int64_t line = start[1] + j * dilations_[1];
        if (plane < low[0] || plane >= high[0] || line < low[1] || line >= high[1]) continue;
        float* const to = image + (plane * sizes[1] + line) * sizes[2] * channels;
        for (int64_t k = 0; k < window_[2]; ++k) {
          const int64_t pixel = start[2] + k * dilations_[2];
          if (pixel < low[2] || pixel >= high[2]) continue;
          for (int64_t c = 0; c < channels; ++c) to[pixel * channels + c] += patch[k * channels + c];
        }
      }
    }
  }

  // The product of sizes and another one; -1 where it is too large.
  static int64_t Product(const Sizes& sizes, int64_t other) {
    int64_t product = other;
    for (int64_t size : sizes) {
      product = product < 0 ? -1 : tensorflow::MultiplyWithoutOverflow(product, size);
    }
    return product;
  }

 private:
  absl::Status Get(tensorflow::OpKernelConstruction* ctx, absl::string_view attr, int64_t least, Sizes* sizes) {
    std::vector<int64_t> found;
    TF_RETURN_IF_ERROR(ctx->GetAttr(attr, &found));
    if (axes_ == 0) axes_ = static_cast<int>(found.size());
    const bool is_valid =
        std::all_of(found.begin(), found.end(), [&](int64_t size) { return size >= least && size <= kMost; });
    if (static_cast<int>(found.size()) != axes_ || axes_ > kMostAxes || !is_valid) {
      return absl::InvalidArgumentError(absl::StrCat("'", ctx->def().name(), "' has an attribute '", attr, "' of ",
                                                     found.size(), " sizes for ", axes_,
                                                     " axes, or one that is too small or too large."));
    }
    sizes->fill(attr == "padding" ? 0 : 1);
    std::copy(found.begin(), found.end(), sizes->end() - axes_);
    return absl::OkStatus();
  }

  // Copies the bytes from `begin` to `end` of what the window reads of a line of pixels.
  void CopyLine(const char* line, int64_t pixels, int64_t pixel_bytes, int64_t start, int64_t begin, int64_t end,
                char* to) const {
    if (dilations_[2] == 1 && start >= 0 && start + window_[2] <= pixels) {
      std::memcpy(to, line + start * pixel_bytes + begin, end - begin);
      return;
    }
    while (begin < end) {
      const int64_t pixel = start + begin / pixel_bytes * dilations_[2], within = begin % pixel_bytes;
      const int64_t bytes = std::min(pixel_bytes - within, end - begin);
      if (pixel < 0 || pixel >= pixels) {
        std::memset(to, 0, bytes);
      } else {
        std::memcpy(to, line + pixel * pixel_bytes + within, bytes);
      }
      begin += bytes;
      to += bytes;
    }
  }

  int axes_ = 0;
  Sizes window_, strides_, dilations_, padding_, sizes_;
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_PATCHES_H_
