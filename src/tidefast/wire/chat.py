"""What the address of the models says beside the chat completions protocol: its headers, for both ends."""

CHAT_PATH = "/v1/chat/completions"
STEP_HEADER = "Tidefast-Step"  # the id of the model step, which the planner mints
WAIT_HEADER = "Tidefast-Wait-Ms"  # how long the caller waits for a whole answer; the model's own timeout without it
REPLAYED_HEADER = "Tidefast-Replayed"  # true: the answer is the journal's
