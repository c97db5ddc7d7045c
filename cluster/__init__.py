"""The cluster: base types shared by every process, and the control plane."""
