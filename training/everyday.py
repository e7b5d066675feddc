"""Everyday requests with concrete commands, written for this project.

The two corpora have few of them: manual pages list what a tool can do, and NL2Bash is mostly `find`, but people want to
undo a commit or free a port. Slots such as {file} are filled with random values, the same in request and command.
"""

from __future__ import annotations

import random
import re

from .corpus import Pair, first_word
from .placeholders import FOLDERS, HOSTS, STEMS, URLS, WORDS

SOURCE = "everyday"
SLOT = re.compile(r"\{([a-z_]+?)(2?)\}")

# Each line has a command, " <- ", and the requests that it answers, separated by " | ".
TABLE = """\
find . -type f -size +{n}M <- find files larger than {n} MB | find files bigger than {n}M | list all files over {n} megabytes | search for files larger than {n}MB in this directory
find . -type f -size +{n}G <- find files larger than {n} GB | list all files over {n} gigabytes | which files are bigger than {n}G
find {dir} -type f -size +{n}M <- find files larger than {n} MB in {dir} | list files over {n}M under {dir} | show the files in {dir} bigger than {n} megabytes
find . -type f -size -{n}k <- find files smaller than {n} KB | list files under {n} kilobytes
ls -lhS <- list files sorted by size | show files by size | list files by size, largest first | sort files by size | list files ordered by size
ls -lhSr <- list files by size, smallest first | sort files from smallest to largest
ls -lt <- list files by date | list files sorted by modification time | show newest files first | list files, most recent first
ls -ltr <- list files by date, oldest first | show oldest files first
ls -a <- list all files including hidden ones | show hidden files | list hidden files
ls -la <- list all files with details including hidden | show all files with permissions
ls -l <- list files with details | show file permissions in this folder | long listing of the current directory
ls {dir} <- list files in {dir} | show the contents of {dir} | what is in {dir}
ls -d */ <- list only directories | show only folders | list subdirectories
ls | wc -l <- count files in the current directory | how many files are in this folder | number of files here
find {dir} -type f | wc -l <- count all files in {dir} recursively | how many files are under {dir}
wc -l {file} <- count lines in {file} | how many lines does {file} have | number of lines in {file} | count the lines of {file}
wc -l <file> <- count lines in a file | how many lines are in a file | count the number of lines in a file
wc -w {file} <- count words in {file} | how many words are in {file}
wc -c {file} <- count bytes in {file} | how many bytes is {file}
find . -name '*.{ext}' <- find all {ext} files | find files with extension {ext} | list every .{ext} file below here
find . -name '*.{ext}' | wc -l <- count all {ext} files | how many .{ext} files are there
find . -name '*.{ext}' -delete <- delete all {ext} files | remove every .{ext} file recursively
find . -name '*.{ext}' | xargs wc -l <- count lines in all {ext} files | count lines of {ext} files
find . -name '{file}' <- find a file named {file} | where is {file} | locate {file} under this directory
find . -iname '*{word}*' <- find files with {word} in the name | find files whose name contains {word}
find . -mtime -1 <- find files changed in the last day | files modified today | find files modified in the last 24 hours
find . -mtime -{n} <- find files modified in the last {n} days | files changed within {n} days
find . -mmin -{n} <- find files modified in the last {n} minutes | files changed within {n} minutes
find . -type f -mtime +{n} <- find files older than {n} days | list files not modified for {n} days
find . -type f -mtime +{n} -delete <- delete files older than {n} days | remove files not changed for {n} days
find . -type f -empty <- find empty files | list all empty files
find . -type d -empty <- find empty directories | list empty folders
find . -type d -empty -delete <- delete empty directories | remove all empty folders
find . -type d -name '{word}' <- find a directory named {word} | find the folder called {word}
find . -type l <- find symbolic links | list all symlinks
find . -type f -printf '%s %p\\n' | sort -nr | head -{n} <- find the {n} largest files | show the {n} biggest files | what are the {n} largest files here
find . -type f -exec chmod 644 {} + <- set permissions of all files to 644 | chmod all files to 644
df -h <- show disk usage | show free disk space | how much disk space is left | check disk space | disk space
du -sh {dir} <- show the size of {dir} | how big is {dir} | disk usage of {dir} | how much space does {dir} take
du -sh . <- show the size of this directory | how big is the current folder | total size of the current directory
du -sh * | sort -h <- show the size of each folder sorted | which folders take the most space | disk usage by folder | sort directories by size
du -ah . | sort -rh | head -{n} <- show the {n} largest files and folders | what are the {n} things using most disk space
free -h <- show memory usage | how much memory is free | check RAM | show free memory
nproc <- how many CPU cores do I have | number of processors
lscpu <- show CPU information | what CPU do I have | processor details
uname -a <- show system information | show the kernel version | what kernel am I running
cat /etc/os-release <- which Linux distribution is this | show the OS version | what version of Linux am I running
uptime <- how long has the system been running | show uptime | system load
date <- what is the current date | show the date and time | what time is it
whoami <- who am I | show my username | current user
pwd <- where am I | show the current directory | print the working directory
cd .. <- go up one directory | go to the parent folder
cd ~ <- go to my home directory | change to the home folder
cd - <- go back to the previous directory
cd {dir} <- go to {dir} | change directory to {dir}
ps aux <- list running processes | show all processes | what is running
ps aux | grep {word} <- find the process {word} | is {word} running | check whether {word} is running
ps aux --sort=-%mem | head <- which processes use the most memory | show processes by memory usage
ps aux --sort=-%cpu | head <- which processes use the most CPU | show processes sorted by CPU usage
top <- show CPU usage | monitor processes | watch system load live
kill {pid} <- kill process {pid} | stop the process with id {pid} | terminate pid {pid}
kill -9 {pid} <- force kill process {pid} | forcibly stop pid {pid}
pkill {word} <- kill the process named {word} | kill all {word} processes | stop every {word} process
kill $(lsof -t -i:{port}) <- kill the process on port {port} | kill whatever is using port {port} | free port {port} | stop the process listening on port {port}
lsof -i :{port} <- what is using port {port} | which process is on port {port} | find the process listening on port {port} | show what runs on port {port}
ss -tuln <- list open ports | show listening ports | which ports are open
lsof {file} <- which process is using {file} | who has {file} open
tar -xzf {stem}.tar.gz <- extract {stem}.tar.gz | unpack {stem}.tar.gz | untar {stem}.tar.gz | decompress {stem}.tar.gz
tar -xzf <file.tar.gz> <- extract a tar.gz file | unpack a tar.gz archive | extract tar.gz | untar a gzipped archive
tar -xzf {stem}.tar.gz -C {dir} <- extract {stem}.tar.gz into {dir} | unpack {stem}.tar.gz to {dir}
tar -xf {stem}.tar <- extract {stem}.tar | untar {stem}.tar
tar -xjf {stem}.tar.bz2 <- extract {stem}.tar.bz2 | unpack {stem}.tar.bz2
tar -xJf {stem}.tar.xz <- extract {stem}.tar.xz | unpack {stem}.tar.xz
tar -czf {stem}.tar.gz {dir} <- compress {dir} into {stem}.tar.gz | create a tar.gz of {dir} called {stem}.tar.gz | archive {dir} as {stem}.tar.gz
tar -czf <archive.tar.gz> <directory> <- create a tar.gz of a directory | compress a folder | make a tar.gz archive
tar -tzf {stem}.tar.gz <- list the contents of {stem}.tar.gz | what is inside {stem}.tar.gz
unzip {stem}.zip <- unzip {stem}.zip | extract {stem}.zip | unpack {stem}.zip
unzip {stem}.zip -d {dir} <- unzip {stem}.zip into {dir} | extract {stem}.zip to {dir}
zip -r {stem}.zip {dir} <- zip {dir} into {stem}.zip | create {stem}.zip from {dir} | zip the folder {dir} as {stem}.zip
gunzip {file}.gz <- decompress {file}.gz | unzip {file}.gz
gzip {file} <- compress {file} | gzip {file}
cp {file} {file2} <- copy {file} to {file2} | make a copy of {file} called {file2}
cp {file} {dir} <- copy {file} into {dir} | copy {file} to the folder {dir}
cp -r {dir} {dir2} <- copy the directory {dir} to {dir2} | copy {dir} recursively to {dir2}
mv {file} {file2} <- rename {file} to {file2} | change the name of {file} to {file2}
mv {file} {dir} <- move {file} to {dir} | move {file} into the folder {dir}
mv *.{ext} {dir} <- move all {ext} files to {dir} | move every .{ext} file into {dir}
rm {file} <- delete {file} | remove {file} | erase {file}
rm *.{ext} <- delete all .{ext} files in this folder | remove the {ext} files here
rm -r {dir} <- delete the directory {dir} | remove {dir} and everything in it | delete the folder {dir}
mkdir {word} <- create a directory called {word} | make a new folder named {word} | create the folder {word}
mkdir -p {word}/{word2} <- create nested directories {word}/{word2} | make the folder {word}/{word2} with parents
touch {file} <- create an empty file {file} | create {file} | make an empty file called {file}
ln -s {file} {file2} <- create a symbolic link {file2} to {file} | make a symlink from {file2} to {file}
chmod +x {stem}.sh <- make {stem}.sh executable | allow running {stem}.sh | make the script {stem}.sh executable
chmod 600 {file} <- make {file} readable only by me | set permissions of {file} to 600
chown {user} {file} <- change the owner of {file} to {user} | make {user} the owner of {file}
chown -R {user} {dir} <- change the owner of {dir} to {user} recursively | make {user} own everything in {dir}
cat {file} <- show {file} | print the contents of {file} | display {file}
less {file} <- page through {file} | view {file} page by page
head -n {n} {file} <- show the first {n} lines of {file} | print the top {n} lines of {file}
tail -n {n} {file} <- show the last {n} lines of {file} | print the final {n} lines of {file}
tail -f {file} <- follow {file} | watch {file} as it grows | show new lines of {file} live | monitor {file}
sed -n '{n}p' {file} <- print line {n} of {file} | show line number {n} of {file}
grep -r '{word}' . <- search for {word} in all files | find {word} in files recursively | search {word} in this directory | grep for {word} in every file
grep -r '{word}' {dir} <- search for {word} in {dir} | find the text {word} under {dir}
grep '{word}' {file} <- search for {word} in {file} | find lines containing {word} in {file} | show the lines of {file} with {word}
grep -v '{word}' {file} <- show lines of {file} without {word} | print lines not containing {word} in {file}
grep -c '{word}' {file} <- count lines containing {word} in {file} | how many lines of {file} contain {word}
grep -n '{word}' {file} <- search for {word} in {file} with line numbers | show line numbers where {word} occurs in {file}
grep -i '{word}' {file} <- search for {word} in {file} ignoring case | case insensitive search for {word} in {file}
grep -rl '{word}' . <- list files containing {word} | which files contain {word} | find files that contain the text {word}
sed -i 's/{word}/{word2}/g' {file} <- replace {word} with {word2} in {file} | substitute {word2} for {word} in {file} | change every {word} to {word2} in {file}
grep -rl '{word}' . | xargs sed -i 's/{word}/{word2}/g' <- replace {word} with {word2} in all files | replace {word} by {word2} recursively
sort {file} <- sort {file} | sort the lines of {file} | sort {file} alphabetically
sort -n {file} <- sort {file} numerically | sort the numbers in {file}
sort -u {file} <- remove duplicate lines from {file} | sort {file} and remove duplicates | unique lines of {file}
sort {file} | uniq -c | sort -nr <- count how often each line occurs in {file} | count duplicate lines in {file}
cut -d, -f{d} {stem}.csv <- print column {d} of {stem}.csv | show field {d} of {stem}.csv
awk '{print $1}' {file} <- print the first column of {file} | show the first word of each line of {file}
awk '{s += $1} END {print s}' {file} <- sum the numbers in {file} | add up the first column of {file}
diff {file} {file2} <- compare {file} and {file2} | show the differences between {file} and {file2} | diff {file} with {file2}
diff -r {dir} {dir2} <- compare the directories {dir} and {dir2} | differences between the folders {dir} and {dir2}
md5sum {file} <- md5 of {file} | compute the MD5 checksum of {file}
sha256sum {file} <- sha256 of {file} | compute the SHA-256 checksum of {file} | verify the hash of {file}
file {file} <- what type of file is {file} | determine the type of {file}
jq . {stem}.json <- pretty print {stem}.json | format {stem}.json | pretty-print a JSON file {stem}.json
tr 'a-z' 'A-Z' < {file} <- convert {file} to uppercase | uppercase the text in {file}
shuf -n {n} {file} <- show {n} random lines of {file} | pick {n} random lines from {file}
split -l {n} {file} <- split {file} into pieces of {n} lines
curl -O {url} <- download {url} with curl | save {url} using curl
wget {url} <- download {url} | download the file at {url} | fetch {url}
curl {url} <- make a GET request to {url} | show the response of {url}
curl -I {url} <- show the HTTP headers of {url} | get the response headers from {url}
ping -c {d} {host} <- ping {host} {d} times | send {d} pings to {host}
ping {host} <- ping {host} | check whether {host} is reachable | is {host} up
dig {host} <- look up the DNS record of {host} | DNS lookup of {host}
traceroute {host} <- trace the route to {host} | show the path packets take to {host}
ip addr <- show my IP address | what is my local IP | list network interfaces
curl ifconfig.me <- what is my public IP | show my external IP address
ssh {user}@{host} <- connect to {host} as {user} | ssh into {host} as {user} | log in to {host} as {user}
ssh-keygen -t ed25519 <- create an SSH key | generate an ssh key pair | make a new SSH key
scp {file} {user}@{host}:{dir} <- copy {file} to {dir} on {host} as {user} | upload {file} to {host} in {dir} as {user}
rsync -av {dir} {dir2} <- sync {dir} to {dir2} | synchronize {dir} with {dir2} | mirror {dir} to {dir2}
python3 -m http.server {port} <- start a web server on port {port} | serve this folder over http on port {port} | serve the current directory on port {port}
python3 -m venv .venv <- create a python virtual environment | make a virtualenv
pip install {word} <- install the python package {word} | pip install {word}
pip install -r requirements.txt <- install python requirements | install packages from requirements.txt
sudo apt install {word} <- install {word} | install the package {word} on ubuntu | install {word} with apt
sudo apt update && sudo apt upgrade <- update all packages | upgrade the system | update ubuntu
sudo apt remove {word} <- uninstall {word} | remove the package {word}
sudo systemctl restart {word} <- restart the {word} service | restart {word}
sudo systemctl start {word} <- start the {word} service
sudo systemctl stop {word} <- stop the {word} service
systemctl status {word} <- status of the {word} service | check the status of {word} | is the {word} service running
sudo systemctl enable {word} <- start {word} at boot | enable the {word} service
journalctl -u {word} -f <- follow the logs of {word} | show live logs of the {word} service
git status <- show git status | what changed in git | which files are modified in this repository
git init <- create a git repository | initialize git here
git clone {url} <- clone {url} | clone the repository {url}
git add . <- stage all changes | add all files to git
git add {file} <- stage {file} | add {file} to git
git commit -m "{word}" <- commit with message {word} | git commit with the message {word}
git commit --amend <- change the last commit message | amend the last commit | edit the last git commit
git reset --soft HEAD~1 <- undo the last commit | undo last git commit | git undo commit | undo the last commit but keep changes | uncommit
git reset --hard HEAD~1 <- undo the last commit and discard changes | throw away the last commit
git reset --soft HEAD~{d} <- undo the last {d} commits | undo {d} commits but keep the changes
git checkout -- {file} <- discard changes to {file} | undo my changes in {file} | revert {file} to the last commit
git reset --hard <- discard all local changes | throw away all uncommitted changes
git reset {file} <- unstage {file} | remove {file} from staging
git checkout -b {word} <- create a branch called {word} | create and switch to the new branch {word} | make a new git branch {word}
git checkout {word} <- switch to branch {word} | check out the branch {word}
git branch <- list git branches | show branches
git branch -d {word} <- delete the branch {word} | remove the git branch {word}
git merge {word} <- merge the branch {word} | merge {word} into the current branch
git push <- push my commits | push to the remote
git push -u origin {word} <- push the branch {word} to origin | push a new branch {word}
git pull <- pull the latest changes | get the latest changes from the remote
git log --oneline <- show the git history | show commits on one line each | list recent commits
git log -n {d} <- show the last {d} commits | list the {d} latest commits
git diff <- show unstaged changes | what did I change | show git changes
git stash <- stash my changes | put my changes aside
git stash pop <- bring back stashed changes | apply the last stash
git remote -v <- show git remotes | list remotes
git blame {file} <- who changed {file} | show who wrote each line of {file}
docker ps <- list running containers | show docker containers
docker ps -a <- list all docker containers | show stopped containers too
docker images <- list docker images
docker stop {word} <- stop the container {word} | stop the docker container {word}
docker logs -f {word} <- follow the logs of the container {word}
docker exec -it {word} bash <- open a shell in the container {word} | get a shell inside {word}
history <- show my command history | list previous commands
crontab -e <- edit my cron jobs | schedule a job
crontab -l <- list cron jobs | show my crontab
env <- show environment variables | list env vars
export {upper}={word} <- set the environment variable {upper} to {word}
echo $PATH <- show the PATH | print my PATH variable
which {word} <- where is {word} installed | find the path of the command {word}
man {word} <- show the manual of {word} | help for the command {word}
passwd <- change my password
sudo useradd {user} <- add a user named {user} | create the user {user}
sudo shutdown now <- shut down the computer | power off now
sudo reboot <- restart the computer | reboot
ffmpeg -i {stem}.mp4 {stem}.mp3 <- convert {stem}.mp4 to mp3 | extract the audio of {stem}.mp4 as mp3
convert {stem}.png {stem}.jpg <- convert {stem}.png to jpg | turn {stem}.png into a jpg
sleep {n} <- wait {n} seconds | pause for {n} seconds
watch -n {d} {word} <- run {word} every {d} seconds | repeat {word} every {d} seconds
seq {n} <- print the numbers from 1 to {n} | count from 1 to {n}
mount <- list mounted filesystems | show mounts
lsblk <- list disks | show block devices | list all drives and partitions
clear <- clear the screen | clear the terminal
exit <- close the terminal | log out
"""  # noqa: E501


def value(kind: str, rng: random.Random) -> str:
    """A random value for a slot of the given kind."""
    stem = rng.choice(STEMS)
    extension = rng.choice(("txt", "csv", "log", "json", "md", "py", "html", "js", "c", "jpg", "png", "pdf", "sh"))
    return {
        "file": f"{stem}.{extension}",
        "stem": stem,
        "ext": extension,
        "dir": rng.choice(FOLDERS),
        "n": str(rng.choice((1, 2, 3, 5, 7, 8, 10, 12, 15, 20, 25, 30, 50, 60, 64, 90, 100, 150, 200, 250, 500, 1000))),
        "d": str(rng.randint(2, 9)),
        "pid": str(rng.randint(100, 32000)),
        "port": str(rng.choice((80, 443, 3000, 3306, 5000, 5432, 8000, 8080, 8888, 9000, rng.randint(1024, 65535)))),
        "word": rng.choice(WORDS),
        "user": rng.choice(("alice", "bob", "carol", "root", "admin", "ubuntu", "deploy", "www-data")),
        "host": rng.choice(HOSTS),
        "url": rng.choice(URLS),
        "upper": rng.choice(("EDITOR", "LANG", "DEBUG", "API_KEY", "NODE_ENV", "MODE")),
    }[kind]  # fmt: skip


def load_everyday(copies: int, seed: int) -> list[Pair]:
    """Return every request of the table `copies` times, each with its own slot values."""
    pairs = []
    for line in TABLE.splitlines():
        command, requests = line.split(" <- ")
        for request in requests.split(" | "):
            rng = random.Random(f"{seed}/{request}")
            varied = SLOT.search(request) is not None
            count = copies if varied else max(1, copies // 2)
            pairs += [fill_slots(request, command, rng) for _ in range(count)]
    return pairs


def fill_slots(request: str, command: str, rng: random.Random) -> Pair:
    """Fill the slots of a request and its command with the same values."""
    chosen: dict[str, str] = {}

    def put(match: re.Match[str]) -> str:
        kind, second = match.groups()
        if match.group() not in chosen:
            taken = set(chosen.values())
            made = value(kind, rng)
            while second and made in taken:
                made = value(kind, rng)
            chosen[match.group()] = made
        return chosen[match.group()]

    filled_request, filled_command = SLOT.sub(put, request), SLOT.sub(put, command)
    return Pair(SOURCE, filled_request, filled_command, first_word(filled_command))
