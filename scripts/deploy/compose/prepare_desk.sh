#!/bin/sh
# What three organisations and a user would do, on one desk: certificates, shares and settings, a folder for each.
# sh prepare_desk.sh FOLDER HOSTS [OWNER]      owner: who gets the files, as of chown
set -eu
folder=$1
hosts=$2
owner=${3:-}

if [ -e "$folder/user/client" ]; then
  echo "$folder is prepared already"
  exit 0
fi
umask 077
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

private-llm certs --out "$work/tls" --user demo
private-llm share "$(python -c 'from importlib.resources import files; print(files("private_llm_hf") / "demo_model")')" --out "$work/shares"
private-llm party --example-config > "$work/party.toml"

for number in 0 1 2; do
  home="$folder/party$number"
  mkdir -p "$home/tls" "$home/shares"
  cp "$work/tls/ca.pem" "$work/tls/party$number.pem" "$work/tls/party$number.key" "$home/tls/"
  cp "$work/shares/party$number.safetensors" "$home/shares/"
  echo demo > "$home/users.txt"
  sed -e "s/^party = 0/party = $number/" -e "s/party0\.\(pem\|key\|safetensors\)/party$number.\1/" \
    -e "s/^  \"party\([0-9]\)\.example\.org:7000\",/  \"party\1-address\",/" "$work/party.toml" > "$home/party.toml"
  party=0
  for address in $(echo "$hosts" | tr ',' ' '); do
    sed -i "s/party$party-address/$address/" "$home/party.toml"
    party=$((party + 1))
  done
done
mkdir -p "$folder/user/tls"
cp "$work"/tls/client-demo/* "$folder/user/tls/"
if [ -n "$owner" ]; then
  chown -R "$owner" "$folder"/party0 "$folder"/party1 "$folder"/party2 "$folder/user"
fi
# Last, as a mark that all is there.
cp -r "$work/shares/client" "$folder/user/client"
if [ -n "$owner" ]; then
  chown -R "$owner" "$folder/user/client"
fi
