"""The settings file as an example, with every table explained."""

EXAMPLE = """\
# One party of a private-llm service. Check it with: private-llm party --config party.toml --check
# Relative paths are seen from this file's folder. An environment variable replaces a setting:
# PRIVATE_LLM_PARTY__LIMITS__ROWS=8, PRIVATE_LLM_PARTY__HOSTS=a:7000,b:7000,c:7000

party = 0                       # this party's number, from 0
hosts = [                       # every party's address, in order, the same at all parties and users
  "party0.example.org:7000",
  "party1.example.org:7000",
  "party2.example.org:7000",
]
protocol = "trio"               # trio, dealer (3 parties) or quad (4); the same everywhere
drain_s = 30.0                  # seconds that sessions may take to end after SIGTERM

[models]                        # name for logs = this party's share file, or a folder with party<N>.safetensors
demo = "shares/party0.safetensors"

[tls]                           # made by `private-llm certs`: ca, then request, then sign
certificate = "tls/party0.pem"  # common name party0; read anew when the file is replaced
key = "tls/party0.key"          # mode 600
ca = "tls/ca.pem"
allow_file = "users.txt"        # users that may come in, a name a line; or allow = ["alice", "bob"]; or all of the CA

[limits]
sessions = 64                   # clients' sessions at a time
sessions_per_user = 16          # of one user (the name in the certificate)
waiting = 64                    # clients that may wait in line for one
rows = 32                       # of one pass, over all requests that it serves
offline_bytes = 1073741824      # on this party's disk, of what is prepared for planned calls (0: nothing is)
gather_s = 0.005                # how long a pass waits for the next requests of sessions that were in the last one
# positions = 4096              # that one session's caches may hold (default: as this machine's memory allows)
# positions_in_all = 65536      # those of all sessions together, half of them of one user (default: the same)
# elements = 50000000           # of the largest array of one pass (default: the same)

[computation]                   # settings of PrivateConfig; those that parties agree upon as everywhere
timeout_s = 120.0               # seconds of silence after which another endpoint counts as dead
idle_s = 1800.0                 # seconds without a call that end a session (0: never)
device = "cpu"                  # or "cuda:0"
# adder = "auto"                # parties far apart: comparison keys where they are faster; these three lines the same
# bandwidth_mbit = 1000         # at all parties, and --adder auto,bandwidth_mbit=1000,latency_ms=20 at
# latency_ms = 20               # users. Mbit/s of a party's connection, milliseconds one way

[operator]
address = "127.0.0.1:9100"      # /live, /ready, /metrics; no authentication: keep it on loopback ("" turns it off)

[log]
format = "text"                 # or "json": one object per line
level = "info"
"""
