"""The control plane: configuration, the cell, the gateway and the command line."""
