"""What `compose.yaml` needs beside the images: configuration files, secret files, health checks."""
