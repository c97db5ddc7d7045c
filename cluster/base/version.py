"""The one place that holds pdserve's version."""

VERSION = "0.1.0"
