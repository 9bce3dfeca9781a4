// SPDX-License-Identifier: Apache-2.0
// The order of a group's collectives where callbacks post some of them.
//
// Ranks match collectives by number, so all ranks must number them in one order. But callbacks begin at another time on
// each rank. So the order is that of a program in which every callback runs at once, in the call that asks for it. If
// the callback of `a` posts `a1` and `a2`:
//
//   the program posts    a, b, c
//   they are numbered    a, a1, a2, b, c
//
// This is a list of what must wait: collectives without a number, and callbacks that have not returned. A place in it
// waits for those before it. What a thread posts or asks for outside callbacks gets a place at the end. Within a
// callback, it gets one just before that callback's. The engine acts on the first place (engine.cpp).
#pragma once

#include <utility>

namespace sennit {

class Operation;

class CallOrder {
 public:
  // A part of the operation, so that a change of the list allocates nothing.
  struct Place {
    Place(Operation* of, bool is_of_post) : operation(of), is_post(is_of_post) {}
    Place(const Place&) = delete;

    Operation* const operation;
    const bool is_post;         // of the collective itself; otherwise of its callbacks
    bool is_in = false;         // a list
    bool has_begun = false;     // callbacks were handed over to the threads that call them
    Place* previous = nullptr;  // in the list
    Place* next = nullptr;
  };

  Place* first() const { return first_; }
  // `next` null: at the end.
  void insert(Place& place, Place* next) {
    place.is_in = true;
    place.next = next;
    place.previous = std::exchange(next != nullptr ? next->previous : last_, &place);
    (place.previous != nullptr ? place.previous->next : first_) = &place;
  }
  void remove(Place& place) {
    place.is_in = false;
    (place.previous != nullptr ? place.previous->next : first_) = place.next;
    (place.next != nullptr ? place.next->previous : last_) = place.previous;
  }
  // Moves to just before `before` what is behind it: the post of an operation, with the posts of others on the way to
  // it, and the operation's callbacks.
  void pull_forward(Place& post, Place& callbacks, Place& before) {
    for (Place* place = is_behind(before, post) ? before.next : nullptr; place != nullptr;) {
      Place* const next = place == &post ? nullptr : place->next;
      if (place->is_post) move(*place, before);
      place = next;
    }
    if (is_behind(before, callbacks)) move(callbacks, before);
  }

 private:
  static bool is_behind(const Place& before, const Place& wanted) {
    const Place* place = before.next;
    while (place != nullptr && place != &wanted) place = place->next;
    return place != nullptr;
  }
  void move(Place& place, Place& next) {
    remove(place);
    insert(place, &next);
  }

  Place* first_ = nullptr;
  Place* last_ = nullptr;
};

}  // namespace sennit
