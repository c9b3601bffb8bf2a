"""Links: all bulk bytes between two members, over lanes that are opened, measured and shared.

Each object is made and owned by the one above it:

    LinkHub                    one per node; starts and ends with the daemon
     ├── SharedByLinks         router, limiters, meters and rules that all links share
     ├── PeerLink              one per other member of the view; dials it, or waits for its call
     ├── TrailingTasks         tasks of reductions that may outlive them
     └── Link                  one per connected member
          ├── SendQueue        frames to send;  MessageQueue: control messages to send
          ├── Acknowledger     tells the other side what came
          └── LanePool         opens, counts and replaces lanes
               └── LinkLane    one connection, with its LaneFrames and its LaneTasks or LaneThreads
"""
