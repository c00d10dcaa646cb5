"""Where a server is, unless somebody says otherwise."""

PORT_DEFAULT = 8700
URL_DEFAULT = f"http://127.0.0.1:{PORT_DEFAULT}"
URL_VARIABLE = "TIDEFAST_URL"
KEY_VARIABLE = "TIDEFAST_KEY"  # the key that the server knows its caller by
