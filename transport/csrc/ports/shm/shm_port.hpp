// SPDX-License-Identifier: Apache-2.0
// The shared-memory port: lanes to the ranks of this host, and one doorbell or bell to sleep on.
#pragma once

#include <array>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "flow/agenda.hpp"
#include "messages/lane.hpp"
#include "ports/shm/shm_lane.hpp"
#include "telemetry/counter_page.hpp"

namespace sennit {

class ShmPort final : public Port {
 public:
  // `ranks_here`: the ranks of this host, in order, with this one; the same on all of them. Empty: the whole group.
  // Throws std::system_error if there is no memory for the segment.
  ShmPort(uint32_t rank, uint32_t world, CounterPage* counter_page = nullptr,
          uint64_t peer_timeout_us = flow::FlowConfig{}.peer_timeout_us, std::span<const uint32_t> ranks_here = {});
  ~ShmPort() override;

  std::vector<std::byte> offer() const { return segment_.offer(); }
  const std::string& why_unnamed() const { return segment_.why_unnamed(); }
  // Opens the segment of a peer of this host. False: there is no common memory with that rank, and `why` says why.
  // Throws std::system_error if this process lacks descriptors or memory.
  bool accept(uint32_t peer, std::span<const std::byte> offer, std::string* why = nullptr);
  // Makes the lane to an accepted peer.
  void connect(uint32_t peer, LaneSink& sink);
  Lane& lane(uint32_t peer) { return *lanes_.at(peer); }
  size_t lane_count() const { return connected_.size(); }
  // Every peer has opened the segment, so its name is removed.
  void unlink() { segment_.unlink(); }

  // Sleeping: prepare_sleep announces it. The caller then makes one more progress round. If nothing moved, it sleeps:
  // in sleep(), or in poll(2) on the descriptors of append_poll_fds(). The first peer that publishes something after
  // the announcement wakes it.
  uint32_t prepare_sleep(Sleep how);
  void sleep(uint32_t ticket, uint64_t timeout_us);
  void cancel_sleep();  // also after poll(2)
  void silence_bell() { segment_.silence_bell(); }
  // Shows the peers that this process runs. Any thread may call it, without a lock.
  void beat();
  // Ends this rank's sleep(), from another thread.
  void wake() { segment_.wake_owner(); }

  std::string_view name() const override { return "shm"; }
  bool progress(uint64_t now_us) override;
  void tell_peers(bool, uint64_t) override { ring_where_dirty(); }
  uint64_t next_timeout_us() const override { return UINT64_MAX; }
  void append_poll_fds(std::vector<pollfd>& out) const override;
  bool has_last_word() const override;
  std::vector<uint32_t> find_gone(uint64_t now_us) override;
  std::string_view failure() const override { return failure_; }
  bool idle() const override;
  void abort(std::string_view reason) override;
  void close() override;
  void revoke() noexcept override;
  CounterList counters() const;
  const flow::Agenda& agenda() const { return agenda_; }

 private:
  void look_at_bells();
  bool stop_watching(uint32_t peer);
  uint32_t inbox_of(uint32_t rank) const;
  void ring_where_dirty();
  void check_peers(uint64_t now_us);
  bool is_gone(uint32_t peer) const;

  const uint32_t rank_;
  const uint32_t world_;
  const std::vector<uint32_t> ranks_here_;  // a rank's place here is the number of its inbox, and of its peers' for it
  const uint64_t peer_timeout_us_;
  CounterPage* const counter_page_;
  ShmSegment segment_;
  std::vector<ShmSegment> peers_;
  std::vector<std::unique_ptr<ShmLane>> lanes_;
  std::vector<bool> lost_;
  LaneSink* sink_ = nullptr;
  std::vector<uint32_t> connected_;              // ranks with a lane: those of this host, not the world
  flow::Agenda agenda_;                          // its members are those of connected_, in that order
  std::vector<uint32_t> idle_rounds_;            // of connected_, in that order: since a round moved something
  std::vector<uint32_t> member_of_;              // by rank
  std::array<uint64_t, WATCH_WORDS> watched_{};  // the bits that were seen set, and not cleared since
  uint64_t next_check_us_ = 0, next_beat_us_ = 0;
  std::string failure_;
};

}  // namespace sennit
