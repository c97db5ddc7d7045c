"""How chunks travel: one file per transport, behind the protocol in `protocol`."""
