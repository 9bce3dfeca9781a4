// SPDX-License-Identifier: Apache-2.0
// exchange_model: schedules of messages among several ranks over shared memory and networks (world.hpp).
#include "model/exchange/world.hpp"
#include "model/runner.hpp"

int main(int count, char** arguments) {
  return sennit::model::run_model<sennit::model::exchange::World>(count, arguments);
}
