// The kernels of torch's CUDA build, computed on the host: each operator that has one for CUDA and one for CPUs runs
// the latter on the same memory, which is the host's anyway, and then takes its time on the current stream.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Copy.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <cstring>
#include <mutex>
#include <set>
#include <vector>

extern "C" cudaError_t stub_run_kernel(cudaStream_t);
extern "C" cudaError_t stub_run_failing_kernel(cudaStream_t);

namespace {

using at::Tensor;
using torch::jit::Stack;

void run_kernel() { C10_CUDA_CHECK(stub_run_kernel(c10::cuda::getCurrentCUDAStream())); }

// Draws what CUDA's generator would draw next, in its own way: the same again for the same seed and offset.
at::Generator host_generator(const std::optional<at::Generator>& given, at::Device device) {
  at::Generator of_device = given && given->defined() ? *given : at::globalContext().defaultGenerator(device);
  std::lock_guard<std::mutex> guard(of_device.mutex());
  uint64_t offset = of_device.get_offset(), seed = of_device.current_seed();
  of_device.set_offset(offset + 4);
  uint64_t mixed = seed ^ (offset + 0x9e3779b97f4a7c15ULL + (seed << 6) + (seed >> 2));
  return at::detail::createCPUGenerator(mixed);
}

// The tensors of one call: the device's, and those on the host that stand for them.
class Call {
 public:
  explicit Call(const c10::FunctionSchema& schema) : schema_(schema) {}

  void find_device(const Stack& stack, size_t first) {
    for (size_t i = first; i < stack.size(); i++) visit(stack[i]);
  }

  c10::IValue to_host(const c10::IValue& value, const c10::Argument& argument) {
    if (value.isTensor()) return host(value.toTensor(), argument);
    if (value.isDevice()) return value.toDevice().is_cuda() ? c10::IValue(at::Device(at::kCPU)) : value;
    if (value.isGenerator() || is_generator(argument)) {
      std::optional<at::Generator> given;
      if (value.isGenerator()) given = value.toGenerator();
      if (given && given->device().is_cpu()) return value;
      return host_generator(given, device_);
    }
    if (value.isTensorList()) {
      c10::List<Tensor> tensors;
      for (const Tensor& each : value.toTensorVector()) tensors.push_back(host(each, argument));
      return tensors;
    }
    if (value.isList() && is_list_of_optional_tensors(argument)) {
      c10::List<std::optional<Tensor>> tensors;
      for (const c10::IValue& each : value.toListRef())
        tensors.push_back(each.isTensor() ? std::optional<Tensor>(host(each.toTensor(), argument)) : std::nullopt);
      return tensors;
    }
    return value;
  }

  c10::IValue to_device(const c10::IValue& value) {
    if (value.isTensor()) return device(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> tensors;
      for (const Tensor& each : value.toTensorVector()) tensors.push_back(device(each));
      return tensors;
    }
    return value;
  }

  // What the operator changed the size of: tensors for its result.
  void resize() {
    for (auto& [original, alias] : pairs_) {
      if (original.sizes() == alias.sizes()) continue;
      TORCH_CHECK(original.numel() == 0, "CUDA stub: ", schema_.name(), " resizes a tensor that is not empty");
      original.resize_(alias.sizes());
      original.copy_(alias);
    }
  }

  at::Device where() const { return device_; }
  bool has_device() const { return has_device_; }

 private:
  void visit(const c10::IValue& value) {
    if (has_device_) return;
    if (value.isTensor()) {
      if (value.toTensor().defined() && value.toTensor().is_cuda()) set(value.toTensor().device());
    } else if (value.isTensorList()) {
      for (const Tensor& each : value.toTensorVector())
        if (each.is_cuda()) return set(each.device());
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      set(value.toDevice());
    }
  }
  void set(at::Device device) {
    has_device_ = true;
    device_ = device;
  }
  static bool is_generator(const c10::Argument& argument) {
    return argument.type()->str().find("Generator") != std::string::npos;
  }
  static bool is_list_of_optional_tensors(const c10::Argument& argument) {
    return argument.type()->str().find("Tensor?[]") != std::string::npos ||
           argument.type()->str().find("Optional[Tensor]") != std::string::npos;
  }
  Tensor host(const Tensor& tensor, const c10::Argument& argument) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    TORCH_CHECK(tensor.layout() == at::kStrided, "CUDA stub: ", schema_.name(), " of sparse tensors is not computed");
    for (auto& [original, alias] : pairs_)
      if (original.is_same(tensor)) return alias;
    auto options = tensor.options().device(at::kCPU);
    bool is_result = argument.kwarg_only() && argument.alias_info() && argument.alias_info()->isWrite();
    Tensor alias = is_result && tensor.numel() == 0
                       ? at::empty({0}, options)
                       : at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
    if (tensor.is_conj()) alias._set_conj(true);
    if (tensor.is_neg()) alias._set_neg(true);
    pairs_.emplace_back(tensor, alias);
    return alias;
  }
  Tensor device(const Tensor& result) {
    if (!result.defined() || !result.device().is_cpu()) return result;
    for (auto& [original, alias] : pairs_)
      if (alias.is_same(result)) return original;
    Tensor made = at::empty_strided(result.sizes(), result.strides(), result.options().device(device_));
    size_t bytes = made.storage().nbytes();
    if (result.numel() > 0) std::memcpy(made.data_ptr(), result.data_ptr(), bytes);
    return made;
  }

  const c10::FunctionSchema& schema_;
  std::vector<std::pair<Tensor, Tensor>> pairs_;
  at::Device device_{at::kCUDA, 0};
  bool has_device_ = false;
};

// Results of the right shapes whose values nobody may use: those of a kernel that failed.
void results_without_values(const c10::OperatorHandle& op, const Stack& arguments, at::Device device, Stack* stack) {
  auto to_meta = [](const Tensor& each) {
    return each.defined() && each.is_cuda()
               ? at::empty_strided(each.sizes(), each.strides(), each.options().device(at::kMeta))
               : each;
  };
  Stack on_meta;
  for (const c10::IValue& value : arguments) {
    if (value.isTensor()) {
      on_meta.emplace_back(to_meta(value.toTensor()));
    } else if (value.isList() && value.type()->str().find("Tensor") != std::string::npos) {
      c10::List<std::optional<Tensor>> tensors;
      for (const c10::IValue& each : value.toListRef())
        tensors.push_back(each.isTensor() ? std::optional<Tensor>(to_meta(each.toTensor())) : std::nullopt);
      on_meta.emplace_back(tensors);
    } else {
      on_meta.push_back(value);
    }
  }
  op.callBoxed(on_meta);  // which raises, too, where the host's code of CUDA's operator would
  for (const c10::IValue& value : on_meta) {
    if (!value.isTensor()) {
      stack->push_back(value);
      continue;
    }
    const Tensor& each = value.toTensor();
    stack->emplace_back(at::empty_strided(each.sizes(), each.strides(), each.options().device(device)));
  }
}

void compute_on_host(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  size_t count = schema.arguments().size(), first = stack->size() - count;
  Call call(schema);
  call.find_device(*stack, first);
  Stack arguments(stack->begin() + first, stack->end());
  stack->resize(first);
  at::AutoDispatchBelowADInplaceOrView below;
  c10::cuda::OptionalCUDAGuard guard;
  if (call.has_device()) guard.set_device(call.where());
  Stack on_host;
  for (size_t i = 0; i < count; i++) on_host.push_back(call.to_host(arguments[i], schema.arguments()[i]));
  try {
    op.callBoxed(on_host);
  } catch (const c10::IndexError&) {
    results_without_values(op, arguments, call.where(), stack);
    // CUDA's kernel asserts that indices are in range, and the error shows when it runs.
    C10_CUDA_CHECK(stub_run_failing_kernel(c10::cuda::getCurrentCUDAStream()));
    return;
  }
  call.resize();
  for (const c10::IValue& each : on_host) stack->push_back(call.to_device(each));
  run_kernel();
}

// Its CPU kernel draws from the default generator, whose state threads share.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> trains) {
  if (input.numel() == 0 || (trains && !*trains))
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  Tensor mask = at::empty_like(input, input.options().dtype(at::kBool));
  mask.bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

// Between host and device, and between dense tensors alike, torch copies by cudaMemcpyAsync, which the runtime has.
Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  bool both = self.is_cuda() && source.is_cuda() && source.layout() == at::kStrided && self.layout() == at::kStrided;
  bool is_plain = self.scalar_type() == source.scalar_type() && self.sizes() == source.sizes() &&
                  self.strides() == source.strides() && self.is_non_overlapping_and_dense() &&
                  self.is_conj() == source.is_conj() && self.is_neg() == source.is_neg();
  if (!both || is_plain || self.is_same(source)) return at::native::copy_(self, source, non_blocking);
  c10::cuda::CUDAGuard guard(self.device());
  auto alias = [](const Tensor& tensor) {
    Tensor made = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
    if (tensor.is_conj()) made._set_conj(true);
    if (tensor.is_neg()) made._set_neg(true);
    return made;
  };
  at::AutoDispatchBelowADInplaceOrView below;
  alias(self).copy_(alias(source));
  run_kernel();
  return self;
}

// CUDA's fused attention has no counterpart on the host: its parts have.
Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                 double dropout, bool is_causal, std::optional<double> scale, bool grouped) {
  return std::get<0>(at::_scaled_dot_product_attention_math(query, key, value, mask, dropout, is_causal, std::nullopt,
                                                            scale, grouped));
}

// What launches nothing, or does so through functions of the runtime.
const std::set<std::string> kOwn = {
    "empty", "empty_strided", "resize_", "set_", "_local_scalar_dense", "_efficientzerotensor", "is_set_to",
    "_resize_output_", "copy_", "scaled_dot_product_attention", "native_dropout", "is_pinned", "_pin_memory", "record_stream",
};

bool makes_a_view(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return true;
  return false;
}

void register_all() {
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  library->impl("copy_", copy_);
  library->impl("native_dropout", native_dropout);
  library->impl("scaled_dot_product_attention", attention);
  // Both: the parts bring their own gradients.
  static auto* of_autograd =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::AutogradCUDA, __FILE__, __LINE__);
  of_autograd->impl("scaled_dot_product_attention", attention);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0 || kOwn.count(name.name.substr(6))) continue;
    auto op = dispatcher.findSchema(name);
    if (!op || !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) || makes_a_view(op->schema())) continue;
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
        !op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd))
      continue;
    std::string full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&compute_on_host>());
  }
}

struct Silent : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

struct RegisterAtLoad {
  RegisterAtLoad() {
    Silent silent;  // torch warns that an operator's kernel is replaced: that is the purpose
    c10::WarningUtils::WarningHandlerGuard guard(&silent);
    register_all();
  }
} register_at_load;

}  // namespace
