// SPDX-License-Identifier: Apache-2.0
// fault_model: schedules of faults against the real flow (runner.hpp).
#include "model/runner.hpp"
#include "model/world.hpp"

int main(int count, char** arguments) { return sennit::model::run_model<sennit::model::World>(count, arguments); }
