// The truth of a loop's condition and of a conditional's predicate.

#ifndef TFSWAP_OPS_CSRC_CORE_DECISION_H_
#define TFSWAP_OPS_CSRC_CORE_DECISION_H_

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/register_types.h"
#include "tensorflow/core/framework/tensor.h"

namespace tfswap {

// As in TensorFlow's conditionals, a number is true if it is not zero, and a string or a tensor if it is not empty.
inline absl::Status IsTrue(const tensorflow::Tensor& value, bool* is_true) {
  if (value.dims() > 0) {
    *is_true = value.NumElements() > 0;
    return absl::OkStatus();
  }
  switch (value.dtype()) {
#define TFSWAP_IS_TRUE(T)                         \
  case tensorflow::DataTypeToEnum<T>::value:      \
    *is_true = value.scalar<T>()() != static_cast<T>(0); \
    return absl::OkStatus();
    TF_CALL_REAL_NUMBER_TYPES(TFSWAP_IS_TRUE)
    TF_CALL_bool(TFSWAP_IS_TRUE)
#undef TFSWAP_IS_TRUE
    case tensorflow::DT_STRING:
      *is_true = !value.scalar<tensorflow::tstring>()().empty();
      return absl::OkStatus();
    default:
      return absl::InvalidArgumentError(absl::StrCat("A condition can't be of type ",
                                                     tensorflow::DataTypeString(value.dtype()), "."));
  }
}

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_DECISION_H_
