"""The status page, which shows the router's nodes and requests as HTML and changes nothing."""
