"""SIP, SDP and RTP without I/O: messages, transactions, dialogs, offers and packets. See docs/design/sip.md."""
