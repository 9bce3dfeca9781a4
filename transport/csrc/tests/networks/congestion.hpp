// SPDX-License-Identifier: Apache-2.0
// Flows that share one link: who gets how much of it, and what waits in its queue.
#pragma once

namespace sennit::networks {

// One JSON object a line for each network and way to control congestion.
void print_congestion();

}  // namespace sennit::networks
