"""The control plane: membership, placement, the controller actor and the launcher of workers."""
