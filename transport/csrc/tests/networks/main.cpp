// SPDX-License-Identifier: Apache-2.0
#include "networks/congestion.hpp"

int main() { sennit::networks::print_congestion(); }
