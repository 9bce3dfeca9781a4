// SPDX-License-Identifier: Apache-2.0
#include "ports/verbs/verbs_library.hpp"

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace sennit {
namespace {

constexpr const char* FILE_NAME = "libibverbs.so.1";

// libibverbs keeps functions of an older interface (IBVERBS_1.0) under the same names. So each function is looked up by
// the version whose structures verbs.h describes.
template <class Function>
void find(void* library, Function*& out, const char* name, const char* version) {
  out = reinterpret_cast<Function*>(dlvsym(library, name, version));
  if (out == nullptr)
    throw std::runtime_error(std::string("verbs: ") + FILE_NAME + " has no " + name + "@" + version +
                             "; rdma-core 33 or later is needed");
}

VerbsLibrary load() {
  void* library = dlopen(FILE_NAME, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = dlerror();
    throw std::runtime_error(std::string("verbs: ") + (why != nullptr ? why : FILE_NAME) +
                             "; install libibverbs (Debian: libibverbs1 ibverbs-providers) or choose another "
                             "SENNIT_TRANSPORT");
  }
  VerbsLibrary out{};
  find(library, out.get_device_list, "ibv_get_device_list", "IBVERBS_1.1");
  find(library, out.free_device_list, "ibv_free_device_list", "IBVERBS_1.1");
  find(library, out.get_device_name, "ibv_get_device_name", "IBVERBS_1.1");
  find(library, out.open_device, "ibv_open_device", "IBVERBS_1.1");
  find(library, out.close_device, "ibv_close_device", "IBVERBS_1.1");
  find(library, out.query_device, "ibv_query_device", "IBVERBS_1.1");
  find(library, out.query_port, "ibv_query_port", "IBVERBS_1.1");
  find(library, out.query_pkey, "ibv_query_pkey", "IBVERBS_1.1");
  find(library, out.query_gid_table, "_ibv_query_gid_table", "IBVERBS_1.11");
  find(library, out.alloc_pd, "ibv_alloc_pd", "IBVERBS_1.1");
  find(library, out.dealloc_pd, "ibv_dealloc_pd", "IBVERBS_1.1");
  find(library, out.reg_mr, "ibv_reg_mr", "IBVERBS_1.1");
  find(library, out.dereg_mr, "ibv_dereg_mr", "IBVERBS_1.1");
  find(library, out.create_comp_channel, "ibv_create_comp_channel", "IBVERBS_1.0");
  find(library, out.destroy_comp_channel, "ibv_destroy_comp_channel", "IBVERBS_1.0");
  find(library, out.create_cq, "ibv_create_cq", "IBVERBS_1.1");
  find(library, out.destroy_cq, "ibv_destroy_cq", "IBVERBS_1.1");
  find(library, out.get_cq_event, "ibv_get_cq_event", "IBVERBS_1.1");
  find(library, out.ack_cq_events, "ibv_ack_cq_events", "IBVERBS_1.1");
  find(library, out.create_srq, "ibv_create_srq", "IBVERBS_1.1");
  find(library, out.destroy_srq, "ibv_destroy_srq", "IBVERBS_1.1");
  find(library, out.create_qp, "ibv_create_qp", "IBVERBS_1.1");
  find(library, out.modify_qp, "ibv_modify_qp", "IBVERBS_1.1");
  find(library, out.destroy_qp, "ibv_destroy_qp", "IBVERBS_1.1");
  find(library, out.get_async_event, "ibv_get_async_event", "IBVERBS_1.1");
  find(library, out.ack_async_event, "ibv_ack_async_event", "IBVERBS_1.1");
  find(library, out.wc_status_str, "ibv_wc_status_str", "IBVERBS_1.1");
  return out;
}

}  // namespace

const VerbsLibrary& VerbsLibrary::system() {
  static const VerbsLibrary library = load();
  return library;
}

}  // namespace sennit
