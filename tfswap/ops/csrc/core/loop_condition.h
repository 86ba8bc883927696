// A loop's condition, computed from its values without a call of its function.
//
// A call takes some microseconds, as long as several small kernels, and most conditions compare a counter: two counters
// in Keras, which limits the iterations too. Conditions on integers are read once and evaluated here. TensorFlow runs
// all others, and those that find values of an unexpected type.

#ifndef TFSWAP_OPS_CSRC_CORE_LOOP_CONDITION_H_
#define TFSWAP_OPS_CSRC_CORE_LOOP_CONDITION_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tensorflow/core/common_runtime/function_body.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor.pb.h"
#include "tensorflow/core/graph/graph.h"

namespace tfswap {

class LoopCondition {
 public:
  // The condition of `function`; none if it does more than compare integers. The function is on a CPU.
  static std::optional<LoopCondition> Of(const tensorflow::FunctionBody* function) {
    LoopCondition made;
    if (function == nullptr || function->ret_nodes.size() != 1) return std::nullopt;
    for (const tensorflow::Node* node : function->graph->op_nodes()) {
      if (node->op_def().is_stateful() && !node->IsArg() && !node->IsRetval()) return std::nullopt;
    }
    if (!made.Read(function->ret_nodes[0], 0)) return std::nullopt;
    return made;
  }

  // Whether another iteration runs; none if a value is no integer.
  std::optional<bool> GoesOn(const std::vector<tensorflow::Tensor>& values) const {
    std::vector<int64_t> stack;
    for (const Step& step : steps_) {
      if (step.kind == kGiven) {
        int64_t value;
        if (step.number >= static_cast<int64_t>(values.size()) || !Number(values[step.number], &value)) {
          return std::nullopt;
        }
        stack.push_back(value);
      } else if (step.kind == kConstant) {
        stack.push_back(step.number);
      } else {
        const int64_t right = stack.back();
        stack.pop_back();
        stack.back() = Compared(step.kind, stack.back(), right);
      }
    }
    return stack.back() != 0;
  }

 private:
  enum Kind { kGiven, kConstant, kLess, kLessEqual, kGreater, kGreaterEqual, kAnd, kOr };
  struct Step {
    Kind kind;
    int64_t number;  // the number of the loop's value, or the constant
  };
  static constexpr int kMostSteps = 16;

  // Appends the steps that compute the input `index` of `node`.
  bool Read(const tensorflow::Node* node, int index) {
    const tensorflow::Node* source = nullptr;
    if (steps_.size() >= kMostSteps || !node->input_node(index, &source).ok()) return false;
    while (source->IsIdentity()) {
      if (!source->input_node(0, &source).ok()) return false;
    }
    int given;
    if (source->IsArg()) {
      if (!tensorflow::GetNodeAttr(source->attrs(), "index", &given).ok()) return false;
      steps_.push_back({kGiven, given});
      return true;
    }
    if (source->IsConstant()) {
      const tensorflow::TensorProto* proto = nullptr;
      tensorflow::Tensor constant;
      int64_t number;
      if (!tensorflow::GetNodeAttr(source->attrs(), "value", &proto).ok() ||
          !constant.FromProto(tensorflow::cpu_allocator_base(), *proto) || !Number(constant, &number)) {
        return false;
      }
      steps_.push_back({kConstant, number});
      return true;
    }
    static const auto* const kinds = new std::map<std::string, Kind>{
        {"Less", kLess}, {"LessEqual", kLessEqual}, {"Greater", kGreater}, {"GreaterEqual", kGreaterEqual},
        {"LogicalAnd", kAnd}, {"LogicalOr", kOr}};
    const auto found = kinds->find(source->type_string());
    if (found == kinds->end() || !Read(source, 0) || !Read(source, 1)) return false;
    steps_.push_back({found->second, 0});
    return true;
  }

  static bool Number(const tensorflow::Tensor& value, int64_t* number) {
    if (value.dims() != 0) return false;
    switch (value.dtype()) {
      case tensorflow::DT_INT32:
        *number = value.scalar<int32_t>()();
        return true;
      case tensorflow::DT_INT64:
        *number = value.scalar<int64_t>()();
        return true;
      case tensorflow::DT_BOOL:
        *number = value.scalar<bool>()();
        return true;
      default:
        return false;
    }
  }

  static bool Compared(Kind kind, int64_t left, int64_t right) {
    switch (kind) {
      case kLess:
        return left < right;
      case kLessEqual:
        return left <= right;
      case kGreater:
        return left > right;
      case kGreaterEqual:
        return left >= right;
      case kAnd:
        return left != 0 && right != 0;
      default:
        return left != 0 || right != 0;
    }
  }

  std::vector<Step> steps_;  // in postfix order
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_LOOP_CONDITION_H_
