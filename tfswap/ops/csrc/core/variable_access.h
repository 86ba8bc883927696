// A kernel's access to the variable behind a handle.

#ifndef TFSWAP_OPS_CSRC_CORE_VARIABLE_ACCESS_H_
#define TFSWAP_OPS_CSRC_CORE_VARIABLE_ACCESS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/refcount.h"

namespace tfswap {

// The variable's handle. Fails if the input is not one handle.
inline absl::Status GetHandleInput(tensorflow::OpKernelContext* ctx, int index,
                                   const tensorflow::ResourceHandle** handle) {
  if (ctx->input(index).NumElements() != 1) {
    return absl::InvalidArgumentError(absl::StrCat("Input ", index, " of '", ctx->op_kernel().name(),
                                                   "' must be the handle of one variable."));
  }
  *handle = &tensorflow::HandleFromInput(ctx, index);
  return absl::OkStatus();
}

inline absl::Status GetVariable(tensorflow::OpKernelContext* ctx, int index,
                                tensorflow::core::RefCountPtr<tensorflow::Var>* variable) {
  const tensorflow::ResourceHandle* handle = nullptr;
  TF_RETURN_IF_ERROR(GetHandleInput(ctx, index, &handle));
  return tensorflow::LookupResource<tensorflow::Var>(ctx, *handle, variable);
}

// The variable, which is created where the step is the first to assign it.
inline absl::Status GetAssignedVariable(tensorflow::OpKernelContext* ctx, int index, tensorflow::DataType type,
                                        tensorflow::core::RefCountPtr<tensorflow::Var>* variable) {
  const tensorflow::ResourceHandle* handle = nullptr;
  TF_RETURN_IF_ERROR(GetHandleInput(ctx, index, &handle));
  return tensorflow::LookupOrCreateResource<tensorflow::Var>(ctx, *handle, variable, [type](tensorflow::Var** created) {
    *created = new tensorflow::Var(type);
    return absl::OkStatus();
  });
}

// Fails where a variable can't be assigned a tensor of that type. `node` names the caller in the error. The caller holds
// the variable's lock.
inline absl::Status CheckAssigned(const std::string& node, tensorflow::DataType type, tensorflow::Var* variable) {
  const tensorflow::DataType held = variable->tensor()->dtype();
  if (held == type) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("'", node, "' assigns ", tensorflow::DataTypeString(type),
                                                 " to a variable of type ", tensorflow::DataTypeString(held), "."));
}

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_VARIABLE_ACCESS_H_
