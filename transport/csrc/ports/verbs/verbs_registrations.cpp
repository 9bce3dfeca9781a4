// SPDX-License-Identifier: Apache-2.0
#include "ports/verbs/verbs_registrations.hpp"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>

namespace sennit {
namespace {

uintptr_t address_of(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

std::string advice(int error, uint64_t wanted_bytes, uint64_t held_bytes) {
  std::string text = "cannot register " + std::to_string(wanted_bytes) + " bytes (" + std::to_string(held_bytes) +
                     " are registered already)";
  if (error != ENOMEM && error != EPERM && error != EAGAIN) return text;
  rlimit limit{};
  getrlimit(RLIMIT_MEMLOCK, &limit);
  if (limit.rlim_cur == RLIM_INFINITY) return text + "; the machine is short of memory";
  return text + "; the limit of locked memory is " + std::to_string(limit.rlim_cur) +
         " bytes: raise it (`ulimit -l unlimited`; systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1)";
}

}  // namespace

VerbsRegistrations::~VerbsRegistrations() {
  while (!entries_.empty()) drop(entries_.size() - 1);
}

void VerbsRegistrations::note(trace::Registration what, const Entry& entry) const {
  trace::registration(rank_, trace::Memory::region, what, entry.region->rkey,
                      reinterpret_cast<const void*>(entry.range.begin), entry.range.end - entry.range.begin);
}

void VerbsRegistrations::borrow(const void* address, size_t size_bytes) {
  if (size_bytes == 0) return;
  const Range range{address_of(address), address_of(address) + size_bytes};
  for (Borrowed& one : borrowed_) {
    if (one.range.begin != range.begin || one.range.end != range.end) continue;
    ++one.count;
    return;
  }
  borrowed_.push_back({range, 1});
}

void VerbsRegistrations::give_back(const void* address, size_t size_bytes) {
  const auto found = std::find_if(borrowed_.begin(), borrowed_.end(), [&](const Borrowed& one) {
    return one.range.begin == address_of(address) && one.range.end == address_of(address) + size_bytes;
  });
  if (found == borrowed_.end() || --found->count != 0) return;
  borrowed_.erase(found);
  for (size_t index = entries_.size(); index-- > 0;) {
    Entry& entry = entries_[index];
    entry.is_kept = entry.is_kept && is_borrowed(entry.range);
    if (!entry.is_kept && entry.users == 0) drop(index);
  }
}

bool VerbsRegistrations::is_borrowed(const Range& range) const {
  return std::any_of(borrowed_.begin(), borrowed_.end(),
                     [&](const Borrowed& one) { return one.range.covers(range.begin, range.end); });
}

ibv_mr* VerbsRegistrations::acquire(const std::byte* address, size_t size_bytes, bool is_written) {
  const uintptr_t begin = address_of(address), end = begin + size_bytes;
  ++acquisitions_;
  for (Entry& entry : entries_) {
    // Memory that nobody guarantees any more may already be other memory.
    if (!entry.range.covers(begin, end) || (is_written && !entry.is_writable)) continue;
    if (!entry.is_kept && entry.users == 0) continue;
    ++entry.users;
    entry.used = acquisitions_;
    ++hits_;
    note(trace::Registration::reused, entry);
    return entry.region.get();
  }
  Range range{begin, end};
  for (const Borrowed& one : borrowed_)
    if (one.range.covers(begin, end) && one.range.end - one.range.begin > range.end - range.begin) range = one.range;
  entries_.push_back(make(range, is_written));
  note(trace::Registration::made, entries_.back());
  return entries_.back().region.get();
}

bool VerbsRegistrations::evict() {
  auto oldest = entries_.end();
  for (auto entry = entries_.begin(); entry != entries_.end(); ++entry)
    if (entry->users == 0 && (oldest == entries_.end() || entry->used < oldest->used)) oldest = entry;
  if (oldest == entries_.end()) return false;
  ++evictions_;
  drop(static_cast<size_t>(oldest - entries_.begin()));
  return true;
}

// Null: errno has the reason.
ibv_mr* VerbsRegistrations::register_range(const Range& range, int access) {
  auto* const address = reinterpret_cast<void*>(range.begin);
  for (;;) {
    ibv_mr* const region = device_.library().reg_mr(device_.domain(), address, range.end - range.begin, access);
    if (region != nullptr || errno != ENOMEM || !evict()) return region;
  }
}

VerbsRegistrations::Entry VerbsRegistrations::make(Range range, bool is_written) {
  const uint64_t size_bytes = range.end - range.begin;
  // A buffer that is read first is often written later, so one registration serves both if it can.
  bool is_writable = true;
  ibv_mr* region = register_range(range, access_);
  int error = region == nullptr ? errno : 0;
  if (region == nullptr && !is_written && (error == EFAULT || error == EACCES || error == EPERM)) {
    is_writable = false;
    region = register_range(range, 0);
    error = region == nullptr ? errno : 0;
  }
  if (region == nullptr) raise_verbs_error(error, device_.name() + ": " + advice(error, size_bytes, registered_bytes_));
  ++registrations_;
  registered_bytes_ += size_bytes;
  return Entry{range, {region, device_.library().dereg_mr}, 1, is_writable, is_borrowed(range), acquisitions_};
}

void VerbsRegistrations::release(ibv_mr* region) {
  for (size_t index = 0; index < entries_.size(); ++index) {
    Entry& entry = entries_[index];
    if (entry.region.get() != region) continue;
    if (--entry.users == 0 && !entry.is_kept) drop(index);
    return;
  }
}

void VerbsRegistrations::drop(size_t index) {
  note(trace::Registration::released, entries_[index]);
  registered_bytes_ -= entries_[index].range.end - entries_[index].range.begin;
  std::swap(entries_[index], entries_.back());
  entries_.pop_back();
}

}  // namespace sennit
